"""Requests: any body is refused, or has the types that mlx-lm reads."""

from __future__ import annotations

import inspect
import json
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from request_bodies import BODIES, GOOD, SERVED, VOCABULARY, check
from transformers import PreTrainedTokenizerBase

from mlxkv.serve.http import request
from mlxkv.serve.refusals import Refused


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(BODIES, st.booleans())
def test_any_body_is_refused_in_one_line_or_has_the_right_types(body, chat):
    try:
        out = check(body, chat)
    except Refused as refused:
        assert refused.status in (400, 404) and "\n" not in refused.message
        assert refused.message.startswith("[") and len(refused.message) < 300
        return
    for name, (kind, low, high) in request.NUMBERS.items():
        if name in out and out[name] is not None:
            assert type(out[name]) is (int if kind is int else float)
            assert low <= out[name] <= high
    assert type(out["stream"]) is type(out["include_usage"]) is bool
    assert all(type(word) is str and word for word in out["stop"])
    assert type(out["logprobs"]) is bool and -1 <= out["top_logprobs"] <= 11
    assert all(0 <= token < VOCABULARY for token in out["logit_bias"] or ())
    assert not set(out["chat_template_kwargs"] or ()) & set(request.RESERVED)
    if not chat:
        assert type(out["prompt"]) is str and out["prompt"]
        return
    for message in out["messages"]:
        assert message["role"] in request.ROLES and type(message["content"]) is str
        for call in message.get("tool_calls", ()):
            assert isinstance(json.loads(call["function"]["arguments"]), dict)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes_are_refused_as_a_body(raw):
    """Those that are JSON objects have no prompt."""
    with pytest.raises(Refused, match=r"\[(body|prompt)\]") as found:
        request.parse(raw, False, SERVED)
    assert found.value.status == 400


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
    assert check(GOOD | {"kv": "int4"}, True) == check(GOOD, True)


def test_a_request_does_not_change():
    found = request.parse(
        b'{"prompt": "a", "max_tokens": 9, "max_completion_tokens": 7}', False, SERVED
    )
    assert (found.prompt, found.max_tokens, found.chat) == ("a", 7, False)
    with pytest.raises(FrozenInstanceError):
        found.max_tokens = 8


def test_templates_take_no_arguments_of_the_tokenizer():
    """Padding alone could ask for a prompt of a billion tokens."""
    own = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    assert set(request.RESERVED) >= own - {"self", "kwargs"}
    for name in ("padding", "return_tensors", "max_length"):
        with pytest.raises(Refused, match=r"\[chat_template_kwargs\]"):
            check(GOOD | {"chat_template_kwargs": {name: 1}}, True)
    assert check(GOOD | {"chat_template_kwargs": {"enable_thinking": False}}, True)


def test_what_clients_send_is_taken():
    """Nulls, integers for numbers, and the roles and parts of OpenAI's clients."""
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
    assert out["max_tokens"] == 100 and out["top_p"] == 1 and "user" not in out
    text = check({"prompt": ["a"], "logprobs": 3}, False)
    assert (text["prompt"], text["logprobs"], text["top_logprobs"]) == ("a", True, 3)
