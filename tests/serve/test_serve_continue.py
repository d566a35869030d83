"""A reply that was cut off goes on where it ended."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from serving import post, refused, serving
from small_models import TINY

from mlxkv.models.replies.continuing import continued

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "Tell me a story about a mouse."}]


@pytest.fixture(scope="module")
def server():
    with serving(TINY) as server:
        yield server


def reply(server, messages=ASK, **more) -> tuple[str, dict]:
    found = post(server, CHAT, messages=messages, **more)
    return found["choices"][0]["message"]["content"], found


def test_two_halves_are_the_whole(server):
    whole, _ = reply(server, max_tokens=60)
    half, first = reply(server, max_tokens=21)
    assert first["choices"][0]["finish_reason"] == "length" and half and whole.startswith(half)
    start = [*ASK, {"role": "assistant", "content": half}]
    rest, second = reply(server, start, max_tokens=39, continue_final_message=True)
    assert half + rest == whole
    usage = second["usage"]
    assert usage["prompt_tokens"] == first["usage"]["prompt_tokens"] + 21
    assert usage["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"]
    # Without the field the same messages are a chat that has ended its turn.
    assert reply(server, start, max_tokens=39)[0] != rest


def test_there_has_to_be_a_start(server, subtests):
    for messages in (
        ASK,
        [{"role": "assistant", "content": "Once"}],
        [*ASK, {"role": "assistant", "content": ""}],
        [*ASK, {"role": "assistant", "content": "", "reasoning": "it does not reason"}],
    ):
        with subtests.test(messages=messages):
            error = refused(server, 400, CHAT, messages=messages, continue_final_message=True)
            assert "continue_final_message" in error["message"]


class Plain:
    """Stands for `Turns` with tokens that are characters."""

    def marked(self, chat):
        return None, [chat]

    def encode(self, parts):
        return [ord(c) for part in parts for c in part]


THINKS = SimpleNamespace(has_thinking=True, think_start="<think>", think_end="</think>")


@pytest.mark.parametrize(
    ("state", "message", "text", "then"),
    [
        ("normal", {"content": "a"}, "a", "normal"),
        ("normal", {"content": "a", "reasoning": "\nr\n"}, "<think>\nr\n</think>a", "normal"),
        ("normal", {"content": "", "reasoning_content": "r"}, "<think>r", "reasoning"),
        ("reasoning", {"content": "a", "reasoning": "r"}, "r</think>a", "normal"),
        ("reasoning", {"content": "", "reasoning": "r"}, "r", "reasoning"),
        ("reasoning", {"content": "a"}, "</think>a", "normal"),
    ],
)
def test_reasoning_goes_where_the_model_wrote_it(state, message, text, then):
    prompt = ([1, 2, 3], [[1], [2, 3]], state)
    tokens, segments, state = continued(THINKS, Plain(), prompt, message)
    assert "".join(map(chr, tokens[3:])) == text and state == then
    assert tokens == [1, *segments[1]] and segments[0] == [1]
