"""Bodies of requests: whatever comes in, what goes on to mlx-lm has the types that it reads."""

from __future__ import annotations

import inspect
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from mlxkv.serve import body
from mlxkv.serve.refusals import Refused

VOCABULARY = 260
KEYS = (
    *("role", "content", "type", "text", "function", "name", "arguments", "tool_calls"),
    *("include_usage", "tool_call_id", "chat_template"),
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.sampled_from(["user", "text", "function", "{}", "1", "m"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=8,
)
FIELDS = (
    *body.NUMBERS,
    *body.ONLY,
    *("model", "stream", "stream_options", "stop", "logprobs", "top_logprobs", "logit_bias"),
    *("prompt", "messages", "tools", "chat_template_kwargs", "user"),
)
GOOD = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3).flatmap(
    lambda some: st.sampled_from([some, GOOD | some, some | GOOD])
)


def check(request: dict, chat: bool) -> dict:
    return body.check(request, chat, "m", "int4", 100, VOCABULARY)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(BODIES, st.booleans())
def test_any_body_is_refused_in_one_line_or_has_the_right_types(request, chat):
    try:
        out = check(request, chat)
    except Refused as refused:
        assert refused.status in (400, 404) and "\n" not in refused.message
        assert refused.message.startswith("[") and len(refused.message) < 300
        return
    assert set(out) <= set(FIELDS) - set(body.ONLY)
    for field, (kinds, low, high) in body.NUMBERS.items():
        if field in out:
            assert isinstance(out[field], float if field in body.FLOATS else kinds)
            assert type(out[field]) is not bool and low <= out[field] <= high
    assert out["model"] == "m" and type(out["stream"]) is bool
    assert type(out["stream_options"]["include_usage"]) is bool
    assert all(type(word) is str and word for word in out["stop"])
    assert type(out["logprobs"]) is bool and -1 <= out["top_logprobs"] <= 11
    assert all(0 <= int(token) < VOCABULARY for token in out.get("logit_bias", {}))
    assert not set(out.get("chat_template_kwargs", {})) & set(body.RESERVED)
    if not chat:
        assert type(out["prompt"]) is str and out["prompt"]
        return
    for message in out["messages"]:
        assert message["role"] in body.ROLES and type(message["content"]) is str
        for call in message.get("tool_calls", ()):
            assert isinstance(json.loads(call["function"]["arguments"]), dict)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes_are_an_object_or_refused(raw):
    try:
        assert isinstance(body.parse(raw), dict)
    except Refused as refused:
        assert refused.status == 400 and refused.message.startswith("[body]")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", True),
        ("temperature", -0.1),
        ("top_p", 1.01),
        ("max_tokens", 0),
        ("max_tokens", 1.0),
        ("seed", "1"),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("logit_bias", {"260": 1}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", {"1": 1e300}),
        ("stream", 1),
        ("top_logprobs", 12),
        ("response_format", {"type": "json_object"}),
        ("n", True),
        ("kv", "int8"),
        ("kv", ["int4"]),
    ],
)
def test_each_limit_holds(field, value):
    with pytest.raises(Refused, match=rf"\[{field}\]"):
        check(GOOD | {field: value}, True)


def test_the_preset_may_be_named():
    assert "kv" not in check(GOOD | {"kv": "int4"}, True)


def test_templates_take_no_arguments_of_the_tokenizer():
    """Padding alone could ask for a prompt of a billion tokens."""
    own = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    assert set(body.RESERVED) >= own - {"self", "kwargs"}
    for name in ("padding", "return_tensors", "max_length"):
        with pytest.raises(Refused, match=r"\[chat_template_kwargs\]"):
            check(GOOD | {"chat_template_kwargs": {name: 1}}, True)
    assert check(GOOD | {"chat_template_kwargs": {"enable_thinking": False}}, True)


def test_what_clients_send_is_taken():
    """Nulls, integers for numbers, roles and parts as OpenAI's clients write them."""
    out = check(
        {
            "model": "m",
            "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "f", "arguments": "{}"},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "7"},
            ],
            "temperature": 1,
            "top_p": None,
            "n": 1,
            "max_tokens": 10_000,
            "xtc_probability": 0,
            "user": "someone",
            "response_format": {"type": "text"},
        },
        True,
    )
    assert [m["role"] for m in out["messages"]] == ["system", "user", "assistant", "tool"]
    assert [m["content"] for m in out["messages"]] == ["be brief", "a", "", "7"]
    assert out["max_tokens"] == 100 and "top_p" not in out and "user" not in out
    text = check({"prompt": ["a"], "logprobs": 3}, False)
    assert (text["prompt"], text["logprobs"], text["top_logprobs"]) == ("a", True, 3)
