"""A coding agent's loop on compressed caches: its replies are those of fresh requests.

What agents do to a conversation takes tokens back from its cache: thoughts are stripped from turns before,
replies are asked for again, history is edited and compacted. By the rule of docs/README.md, "Cutting back", what
then follows is computed as well as from a fresh prompt: texts are equal, or part where the two best tokens
tie. Each reply here is compared with the same request under a `cache_salt` of its own, which finds no cache.
"""

import json
import shutil
from itertools import count

import mlx.core as mx
import pytest
from scripted_models import call
from serving import post, serving, settled
from small_models import TINY

from mlxkv.corpora.corpus import pieces
from mlxkv.serve import sampling
from mlxkv.serve.apis import anthropic
from mlxkv.serve.request import ModelInfo

TIE = 0.05  # nats between the two best tokens
PAGES = 200  # tokens at the least that a loop holds in pages
# The embedded model's turns, with tools: a model that says something of its own is needed here.
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% set tool_call = c.function %}"
    '<tool_call>\n{"name": {{ tool_call.name | tojson }}, '
    '"arguments": {{ tool_call.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
TOOLS = [{"name": "read", "description": "Reads a file.", "input_schema": {"type": "object"}}]
SALTS = count()
COMPARED: list[bool] = []  # whether a reply is that of a fresh request, to the last token


@pytest.fixture(scope="module")
def said() -> list[str | None]:
    """What the model says next; None: what it would."""
    return [None]


@pytest.fixture(scope="module")
def server(said, tmp_path_factory):
    """With int4: every preset is taken back in tests/patching/test_trimming.py."""
    folder = tmp_path_factory.mktemp("loop") / "loop"
    shutil.copytree(TINY, folder)
    path = folder / "config.json"  # windows that have moved on cannot go back: these do not move
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window": 8192}))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))

    def scripted(args, tokenizer):
        if said[0] is None:
            return lambda logprobs: mx.argmax(logprobs, axis=-1)
        left = [*tokenizer.encode(said[0], add_special_tokens=False), tokenizer.eos_token_id]
        return lambda logprobs: mx.array([left.pop(0) if left else tokenizer.eos_token_id])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "sampler_of", scripted)
        with serving(folder, dtype="float32", chunk=256) as server:
            yield server


def passages(length: int):
    """Texts that the model knows, of so many characters each."""
    text = " ".join(one for parts in pieces("evaluation").values() for one in parts)
    for start in range(0, 12 * length, length):
        yield text[start : start + length]


def ask(server, messages: list[dict], **more) -> dict:
    return post(
        server, "/v1/messages", messages=messages, tools=TOOLS, **{"max_tokens": 300} | more
    )


def cached(found: dict) -> int:
    return found["usage"]["cache_read_input_tokens"]


def plain(messages: list[dict]) -> dict:
    """The same messages as OpenAI's chat takes them."""
    model_info = ModelInfo("loop", "", 1 << 14, 512, 3072)
    asked = anthropic.read_messages({"messages": messages, "tools": TOOLS}, model_info)
    return {"messages": asked.messages, "tools": asked.tools}


def compare(server, messages: list[dict]) -> int:
    """Ask for a reply from the cache and for a fresh one. Returns how many tokens the first one found."""
    asked = plain(messages)
    body = asked | {"max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    kept = post(server, "/v1/chat/completions", **body)
    fresh = post(server, "/v1/chat/completions", cache_salt=f"s{next(SALTS)}", **body)
    assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    COMPARED.append(True)
    for ours, theirs in zip(*map(steps, (kept, fresh)), strict=False):
        best, next_best = sorted((one["logprob"] for one in theirs["top_logprobs"]), reverse=True)
        if ours["id"] != theirs["id"]:
            assert best - next_best < TIE, (ours, theirs)
            COMPARED[-1] = False
            break  # from here on they answer different texts
    else:
        assert kept["choices"][0]["message"] == fresh["choices"][0]["message"]
    return kept["usage"]["prompt_tokens_details"]["cached_tokens"]


def steps(found: dict) -> list[dict]:
    return found["choices"][0]["logprobs"]["content"]


def turn(server, said, messages, words: str, path: str) -> dict:
    """The model thinks, and calls a tool; the client keeps the call alone."""
    said[0] = f"(thinking) {words} (so) " + call({"name": "read", "arguments": {"path": path}})
    found = ask(server, messages)
    assert found["stop_reason"] == "tool_use"
    (use,) = [block for block in found["content"] if block["type"] == "tool_use"]
    said[0] = None
    return {"role": "assistant", "content": [use]} | {"found": cached(found)}


@pytest.mark.slow
def test_a_loop_says_what_fresh_requests_say(server, said):
    COMPARED.clear()
    texts = passages(420)
    chat = [{"role": "user", "content": f"Read the files. {next(texts)}"}]
    grown = []
    for i in range(2):
        step = turn(server, said, chat, next(texts)[:90], f"file{i}")
        grown.append(step.pop("found"))
        use = step["content"][0]
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": next(texts)}
        chat += [step, {"role": "user", "content": [result]}]
        # Its thoughts are gone from the turn before: the cache is cut back there.
        found = compare(server, chat)
        assert i == 0 or found >= grown[-1]  # up to the end of a page
    assert grown == sorted(grown) and grown[-1] > PAGES
    assert compare(server, chat) > PAGES  # asked again
    # Another question in place of the last result.
    edited = [*chat[:-2], {"role": "assistant", "content": "I have read it."}]
    edited += [{"role": "user", "content": "Who is in the story?"}]
    assert compare(server, edited) > PAGES
    # Compacted: the start and a summary.
    short = [chat[0], {"role": "assistant", "content": f"In short: {next(texts)[:200]}"}]
    assert compare(server, [*short, {"role": "user", "content": "Go on."}]) > 0
    # And the long conversation once more, where it was left.
    assert compare(server, chat) > PAGES
    assert settled(server)["memory"]["promised_bytes"] == 0
    assert sum(COMPARED) >= len(COMPARED) - 2  # ties are rare
    print(f"{sum(COMPARED)} of {len(COMPARED)} replies are equal")
