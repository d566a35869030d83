"""Stop words in all APIs, plain and streamed: the text ends before them, the reply with them."""

from __future__ import annotations

import json

import pytest
from saying import call, saying, write_thinker
from serving import events, send, settled

CAPITAL = "The capital of France is Paris. It is old.\n\nYes — naïve 😀 text."
ASK = [{"role": "user", "content": "Tell me."}]
WEATHER = {"name": "weather", "arguments": {"city": "Oslo"}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
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


def reply(server, path: str, stop: list[str], stream: bool, **more) -> tuple[str, str, dict]:
    """Text, reason and last document of a reply, whatever the API."""
    body = {"model": "caller", "max_tokens": 200, "stream": stream, "messages": ASK} | more
    if path == "/v1/messages":
        body["stop_sequences"] = stop
    else:
        body["stop"] = stop
    if path == "/v1/completions":
        body["prompt"] = body.pop("messages")[0]["content"]
    status, _, data = send(server, "POST", path, body)
    assert status == 200, data
    if path == "/v1/messages":
        return _message(data, stream)
    parts = events(data) if stream else [json.loads(data)]
    choices = [choice for part in parts for choice in part["choices"]]
    said = [
        one.get("delta") or one.get("message") or {"content": one.get("text")} for one in choices
    ]
    text = "".join((one.get("content") or "") if stream else one["content"] for one in said)
    return text, choices[-1]["finish_reason"], parts[-1]


def _message(data: bytes, stream: bool) -> tuple[str, str, dict]:
    if not stream:
        found = json.loads(data)
        return "".join(one["text"] for one in found["content"]), found["stop_reason"], found
    lines = [line for line in data.decode().splitlines() if line.startswith("data: ")]
    parts = [json.loads(line[6:]) for line in lines]
    text = "".join(one.get("delta", {}).get("text", "") for one in parts)
    (last,) = [one for one in parts if one["type"] == "message_delta"]
    return text, last["delta"]["stop_reason"], last["delta"]


def before(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The text before its first stop word, and that word."""
    places = [(text.find(word), len(word), word) for word in stop if word in text]
    return (text[: min(places)[0]], min(places)[2]) if places else (text, None)


def kept(server) -> list[tuple[list[int], list]]:
    """Tokens and caches of the sequences that are kept, the latest last."""
    return [(session.tokens, session.cache) for session in server.engine.sessions.entries]


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
    for text in ("Is 2 <t", "A tag: <tool_cal", "Wow. ", "\n\n", "  \n"):
        said[0] = text
        # mlx-lm's detokenizers drop a space at the start of a text.
        whole = text.removeprefix(" ")
        assert [reply(server, path, stop, stream)[0] for stream in (False, True)] == [whole] * 2


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
    (held,) = [one for one in kept(server) if one[0][-count:] == tokens[:count]]
    assert {one.size() for one in held[1]} == {len(held[0])} == {last["kv"]["tokens"]}


def test_thoughts_and_calls_are_text_of_the_model(server, said):
    def ask(stop: str, stream: bool) -> tuple[str, str, list, str]:
        more = {"tools": [TOOL], "messages": ASK, "stop": [stop], "max_tokens": 200}
        status, _, data = send(server, "POST", PATHS[1], more | {"stream": stream})
        assert status == 200
        choices = [
            choice
            for part in (events(data) if stream else [json.loads(data)])
            for choice in part["choices"]
        ]
        said = [choice.get("delta") or choice.get("message") or {} for choice in choices]
        return (
            "".join(one.get("reasoning") or "" for one in said),
            "".join(one.get("content") or "" for one in said),
            [c["function"]["name"] for one in said for c in one.get("tool_calls") or ()],
            choices[-1]["finish_reason"],
        )

    said[0] = "<think>Let me look.</think>Well. " + call(WEATHER, WEATHER | {"name": "other"})
    for stream in (False, True):
        assert ask("zebra", stream) == (
            "Let me look.",
            "Well. ",
            ["weather", "other"],
            "tool_calls",
        )
        assert ask("me lo", stream) == ("Let ", "", [], "stop")
        assert ask("look.</th", stream) == ("Let me ", "", [], "stop")
        assert ask(". <tool_c", stream) == ("Let me look.", "Well", [], "stop")
        assert ask("</tool_call>", stream)[2:] == (["weather"], "tool_calls")
        assert ask('"other"', stream)[2:] == (["weather"], "tool_calls")
        assert ask('"Osl', stream) == ("Let me look.", "Well. ", [], "stop")  # half a call is none


def test_a_start_that_goes_on(server, said):
    said[0] = " of France is Paris."
    start = {"messages": [*ASK, {"role": "assistant", "content": "The capital"}]}
    more = start | {"continue_final_message": True}
    assert reply(server, PATHS[1], [" is"], False, **more)[0] == " of France"
    assert reply(server, PATHS[1], [" o"], True, **more)[0] == ""
    assert reply(server, PATHS[1], [], False, **more)[0] == said[0]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_in_openais_two_formats(server, said, stream):
    """The entry of a token is its own, whatever else could have come; a text's are lists."""
    said[0] = " capital of"
    settings = {"max_tokens": 30, "stream": stream, "model": "caller"}
    chat = {"messages": ASK, "logprobs": True, "top_logprobs": 3} | settings
    text = {"prompt": "The", "logprobs": 3} | settings
    steps, lists = [], []
    for path, body, out in (
        ("/v1/chat/completions", chat, steps),
        ("/v1/completions", text, lists),
    ):
        status, _, data = send(server, "POST", path, body)
        assert status == 200
        for part in events(data) if stream else [json.loads(data)]:
            for choice in part["choices"]:
                out += [choice["logprobs"]] if "logprobs" in choice else []
    steps = [step for part in steps for step in part["content"]]
    encoded = server.engine.tokenizer.encode(said[0], add_special_tokens=False)
    assert [step["id"] for step in steps] == encoded  # without the end of the turn
    spoken = [step["token"] for step in steps]
    assert "".join(spoken) == said[0] and bytes(steps[0]["bytes"]).decode() == spoken[0]
    for step in steps:
        best = [one["logprob"] for one in step["top_logprobs"]]
        assert best == sorted(best, reverse=True) and step["logprob"] <= best[0] + 1e-6
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert sum(len(one[name]) for one in lists) == len(steps)
    offsets = [at for one in lists for at in one["text_offset"]]
    assert offsets == [len("".join(spoken[:n])) for n in range(len(steps))]
