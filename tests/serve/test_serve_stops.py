"""Stop words in all APIs, plain and streamed: the text ends before them, the reply with them. Log-probabilities."""

import json
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from scripted_models import TOOL, WEATHER, call, saying, write_thinker
from serving import events, send, serving, settled

from mlxkv.loading.load import load

CAPITAL = "The capital of France is Paris. It is old.\n\nYes — naïve 😀 \0text."
ASK = [{"role": "user", "content": "Tell me."}]
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages")
STOPS = [
    ["l of Fr"],  # begins and ends inside tokens
    [" Paris"],
    ["The c"],  # the first characters of the reply
    ["is", "France is P"],  # the longer began first
    ["France is Q", "is Par"],  # the longer never comes
    ["naïve 😀"],
    ["\U0001f600"],
    ["\U0001f601", "—"],
    ["text."],
    ["text.!", "zebra"],  # none
    [".\n\nYes —!"],  # none
]


@pytest.fixture(scope="module")
def said() -> list[str]:
    return [""]


@pytest.fixture(scope="module")
def server(said, tmp_path_factory):
    """Tokens of several letters, learned from other text: few stop words are whole tokens."""
    folder = write_thinker(tmp_path_factory.mktemp("stops") / "caller", words=400)
    with saying(folder, said, kv="int4") as server:
        yield server


def ask(server, path: str, stop: list[str], stream: bool, **more) -> tuple[dict, str, dict]:
    """Texts by kind, reason and last document of a reply, whatever the API."""
    body = {"model": "caller", "max_tokens": 200, "stream": stream, "messages": ASK} | more
    body["stop_sequences" if path == "/v1/messages" else "stop"] = stop
    if path == "/v1/completions":
        body["prompt"] = body.pop("messages")[0]["content"]
    status, _, data = send(server, "POST", path, body)
    assert status == 200, data
    if path == "/v1/messages":
        lines = data.decode().splitlines() if stream else [f"data: {data.decode()}"]
        parts = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        said = parts if not stream else [one.get("delta", {}) for one in parts]
        blocks = [block for one in said for block in one.get("content", [one])]
        (last,) = [one for one in said if "stop_reason" in one]
        return (
            {"content": "".join(one.get("text", "") for one in blocks)},
            last["stop_reason"],
            last,
        )
    parts = events(data) if stream else [json.loads(data)]
    choices = [choice for part in parts for choice in part["choices"]]
    said = [
        one.get("delta") or one.get("message") or {"content": one.get("text")} for one in choices
    ]
    texts = {
        kind: "".join(one.get(kind) or "" for one in said) for kind in ("content", "reasoning")
    }
    texts["calls"] = [c["function"]["name"] for one in said for c in one.get("tool_calls") or ()]
    return texts, choices[-1]["finish_reason"], parts[-1]


def reply(*asked, **more) -> tuple[str, str, dict]:
    """Text, reason and last document of a reply."""
    texts, reason, last = ask(*asked, **more)
    return texts["content"], reason, last


def before(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The text before its first stop word, and that word."""
    places = [(text.find(word), len(word), word) for word in stop if word in text]
    return (text[: min(places)[0]], min(places)[2]) if places else (text, None)


def test_the_text_ends_before_the_first_stop_word(server, said, subtests):
    """In the three APIs in turn."""
    said[0] = CAPITAL
    for i, stop in enumerate(STOPS):
        path = PATHS[i % 3]
        with subtests.test(stop=stop, path=path):
            want, word = before(CAPITAL, stop)
            for stream in (False, True):
                text, reason, last = reply(server, path, stop, stream)
                assert text == want
                if path == "/v1/messages":
                    reason_of = "stop_sequence" if word else "end_turn"
                    assert (reason, last["stop_sequence"]) == (reason_of, word)
                else:
                    assert reason == "stop"


@pytest.mark.parametrize("stop", [["!"], []], ids=str)
@pytest.mark.parametrize("path", PATHS[1:])
def test_what_could_have_become_something_is_kept_at_the_end(server, said, path, stop):
    for text in ("Is 2 <t", "A tag: <tool_cal", "Wow. ", "\n\n", "  \n", "    x", " y"):
        said[0] = text  # mlx-lm's detokenizers drop a space at the start of a text
        assert [reply(server, path, stop, stream)[0] for stream in (False, True)] == [text] * 2


def test_generation_ends_with_the_stop_word_and_what_was_read_is_kept(server, said):
    said[0] = CAPITAL
    tokenizer = server.engine.tokenizer
    tokens = tokenizer.encode(CAPITAL, add_special_tokens=False)
    count = next(n for n in range(len(tokens)) if "of Fr" in tokenizer.decode(tokens[:n]))
    for stream in (False, True):
        more = {"stream_options": {"include_usage": True}} if stream else {}
        text, reason, last = reply(server, PATHS[1], ["l of Fr"], stream, **more)
        assert (text, reason) == ("The capita", "stop")
        assert last["usage"]["completion_tokens"] == count
        assert last["kv"]["tokens"] == last["usage"]["prompt_tokens"] + count
    settled(server)
    assert not server.engine.jobs
    sessions = server.engine.sessions.entries
    (kept,) = [one for one in sessions if one.tokens[-count:] == tokens[:count]]
    assert {layer.size() for layer in kept.cache} == {len(kept.tokens)} == {last["kv"]["tokens"]}


def test_thoughts_and_calls_are_text_of_the_model(server, said):
    def parts(stop: str, stream: bool) -> tuple[str, str, list, str]:
        texts, reason, _ = ask(
            server, PATHS[1], [stop], stream, tools=[{"type": "function", "function": TOOL}]
        )
        return texts["reasoning"], texts["content"], texts["calls"], reason

    said[0] = "<think>Let me look.</think>Well. " + call(WEATHER, WEATHER | {"name": "other"})
    for stream in (False, True):
        assert parts("zebra", stream)[2:] == (["weather", "other"], "tool_calls")
        assert parts("me lo", stream) == ("Let ", "", [], "stop")
        assert parts("look.</th", stream) == ("Let me ", "", [], "stop")
        assert parts(". <tool_c", stream) == ("Let me look.", "Well", [], "stop")
        assert parts("</tool_call>", stream)[2:] == (["weather"], "tool_calls")
        assert parts('"other"', stream)[2:] == (["weather"], "tool_calls")
        assert parts('"Osl', stream) == (
            "Let me look.",
            'Well. <tool_call>\n{"name": "weather", "arguments": {"city": ',
            [],
            "stop",
        )  # half a call is none


def test_a_start_that_goes_on(server, said):
    said[0] = " of France is Paris."
    start = {"messages": [*ASK, {"role": "assistant", "content": "The capital"}]}
    more = start | {"continue_final_message": True}
    assert reply(server, PATHS[1], [" is"], False, **more)[0] == " of France"
    assert reply(server, PATHS[1], [" o"], True, **more)[0] == ""
    assert reply(server, PATHS[1], [], False, **more)[0] == said[0]
    for said[0] in (" of France is Paris.", "   of France.", "  ", "\n  of it"):
        for stream in (True, False):  # a text goes on, too, and clients put it behind the prompt
            text, _, last = reply(server, TEXT, [], stream, prompt="The capital", logprobs=0)
            assert text == said[0]
    found = last["choices"][0]["logprobs"]
    assert text[found["text_offset"][-1] :] == found["tokens"][-1]


# -- log-probabilities: a float32 softmax of the logits, an entry for each token

TEXT, CHAT, _ = PATHS
COUNT, BEST = 12, 5
LOUD = {"logit_bias": {"257": -100}}  # never the last token


def documents(server, path: str, stream: bool, **more) -> list[dict]:
    """The log-probabilities of a reply, in the parts in which they come."""
    body = {"stream": stream, "temperature": 0, "max_tokens": COUNT, **more}
    if path == CHAT:
        body |= {"messages": ASK, "logprobs": True, "top_logprobs": BEST}
    else:
        body |= {"prompt": "Tell me.", "logprobs": BEST}
    status, _, data = send(server, "POST", path, body)
    assert status == 200, data
    parts = events(data) if stream else [json.loads(data)]
    choices = [choice for part in parts for choice in part["choices"]]
    return [choice["logprobs"] for choice in choices if "logprobs" in choice]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_in_openais_two_formats(server, said, stream):
    """The entry of a token is its own, whatever else could have come; a text's are lists."""
    said[0] = " capital of 😀\0."
    steps = [step for one in documents(server, CHAT, stream) for step in one["content"]]
    encoded = server.engine.tokenizer.encode(said[0], add_special_tokens=False)
    assert [step["id"] for step in steps] == encoded  # without the end of the turn
    spoken = [bytes(step["bytes"]) for step in steps]
    assert b"".join(spoken).decode() == said[0] and spoken[0].decode() == steps[0]["token"]
    for step in steps:
        best = [one["logprob"] for one in step["top_logprobs"]]
        assert best == sorted(best, reverse=True) and step["logprob"] <= best[0] + 1e-6
    lists = documents(server, TEXT, stream)
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert sum(len(one[name]) for one in lists) == len(steps)
    offsets = [at for one in lists for at in one["text_offset"]]
    assert offsets == [len(b"".join(spoken[:n]).decode(errors="ignore")) for n in range(len(steps))]


def entries(server, path: str, stream: bool, **more) -> list[tuple[int, float, list[float]]]:
    """(token, its log-probability, those of the best) of a reply."""
    found = documents(server, path, stream, **LOUD, **more)
    if path == CHAT:
        steps = [step for one in found for step in one["content"]]
        tops = [[best["logprob"] for best in step["top_logprobs"]] for step in steps]
        return [(step["id"], step["logprob"], top) for step, top in zip(steps, tops, strict=True)]
    numbers = [x for one in found for x in one["token_logprobs"]]
    tops = [sorted(x.values(), reverse=True) for one in found for x in one["top_logprobs"]]
    return [(-1, number, top) for number, top in zip(numbers, tops, strict=True)]


def softmax(folder, dtype: str, prompt: list[int]) -> list[tuple[int, float, list[float]]]:
    """The same by the model alone, a token at a time, without the last token."""
    model, _ = load(str(folder), "int4", dtype=dtype)
    caches, out = make_prompt_cache(model), []
    model(mx.array([prompt[:-1]]), cache=caches)
    token = prompt[-1]
    for _ in range(COUNT):
        logits = model(mx.array([[token]]), cache=caches)[0, -1].astype(mx.float32)
        logits[257] -= 100
        logprobs = logits - mx.logsumexp(logits)
        token = mx.argmax(logprobs).item()
        out.append((token, logprobs[token].item(), mx.sort(logprobs)[-BEST:].tolist()[::-1]))
    return out


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-5), ("float16", 1e-3)])
def test_they_are_a_softmax_in_float32(model_folder, dtype, bound, subtests):
    """Where batches round otherwise than one row: logits of 16 bits differ in their last bit."""
    with serving(model_folder, dtype=dtype) as server:
        ids = server.engine.tokenizer.encode
        prompts = {CHAT: "<s>user\nTell me.</s>\n<s>assistant\n", TEXT: "Tell me."}
        for path, prompt in prompts.items():
            expected = softmax(model_folder, dtype, ids(prompt, add_special_tokens=False))
            for stream in (False, True):
                with ThreadPoolExecutor(3) as pool:
                    salts = [*[f"{path}{stream}"] * 2, "other", "third"]  # the second is a hit
                    found = [entries(server, path, stream, cache_salt=salt) for salt in salts[:2]]
                    jobs = [
                        pool.submit(entries, server, path, stream, cache_salt=s) for s in salts[2:]
                    ]
                    found += [job.result() for job in jobs]
                for case, steps in zip(("cold", "hit", "batch", "batch"), found, strict=True):
                    with subtests.test(path, stream=stream, case=case):
                        assert len(steps) == COUNT
                        for (token, number, top), (id, value, best) in zip(
                            steps, expected, strict=True
                        ):
                            assert path == TEXT or token == id
                            assert number == pytest.approx(value, abs=bound)
                            assert top == pytest.approx(best, abs=bound)


def test_the_end_of_a_turn_has_no_entry(model_folder):
    body = {"prompt": "Tell me.", "logprobs": 1, "logit_bias": {"257": 100}, "max_tokens": 9}
    with serving(model_folder) as server:
        status, _, data = send(server, "POST", TEXT, body)
        (choice,) = json.loads(data)["choices"]
        assert status == 200 and choice["text"] == "" and not choice.get("logprobs")
