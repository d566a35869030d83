"""Tool calls that a request forces: the model is a random one, so only the grammar can write them."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.tool_parsers import json_tools
from random_model import write_model
from saying import ASK, TEMPLATE
from serving import post, refused, serving

from mlxkv.serve.grammar import Grammars, calls_of, of_choice

pytest.importorskip("llguidance")

CITY = {
    "type": "function",
    "function": {
        "name": "city",
        "parameters": {
            "type": "object",
            "properties": {"name": {"$ref": "#/$defs/known"}, "near": {"type": "boolean"}},
            "required": ["name", "near"],
            "additionalProperties": False,
            "$defs": {"known": {"enum": ["Oslo", "Bergen"]}},
        },
    },
}
OTHER = {"type": "function", "function": {"name": "other"}}


@pytest.fixture(scope="module")
def free(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("forced") / "caller", template=TEMPLATE)
    with serving(folder) as server:
        yield server


def wish(choice, tools=(CITY, OTHER), **more) -> dict:
    return {"messages": ASK, "tools": list(tools), "tool_choice": choice, "max_tokens": 600} | more


def forced(server, choice, **more) -> dict:
    return post(server, "/v1/chat/completions", **wish(choice, **more))


def test_a_tool_is_called_where_the_request_says_so(free):
    for choice in ("required", {"type": "function", "function": {"name": "city"}}):
        (found,) = forced(free, choice, tools=[CITY])["choices"]
        (one,) = found["message"]["tool_calls"]
        assert found["finish_reason"] == "tool_calls" and one["function"]["name"] == "city"
        arguments = json.loads(one["function"]["arguments"])
        assert arguments["name"] in ("Oslo", "Bergen") and type(arguments["near"]) is bool
    chosen = {"type": "function", "function": {"name": "city"}}
    (found,) = forced(free, chosen)["choices"]
    assert found["message"]["tool_calls"][0]["function"]["name"] == "city"


def test_a_choice_that_cannot_be_followed_is_refused(free):
    def said(choice, **more):
        return refused(free, 400, "/v1/chat/completions", **wish(choice, **more))["message"]

    missing = {"type": "function", "function": {"name": "nowhere"}}
    assert "names a tool that is not among" in said(missing)
    assert "names a tool that is not among" in said("required", tools=())
    for wrong in ("sometimes", "", {}):
        assert "[tool_choice] must be auto, none, required" in said(wrong)
    assert "tool_calls" not in forced(free, None, max_tokens=2)["choices"][0]["message"]
    form = {"type": "json_object"}
    assert "[tool_choice] a call follows no response_format" in said(
        "required", response_format=form
    )
    wrong = {"type": "function", "function": {"name": "x", "parameters": {"properties": 7}}}
    assert "[tools] not a schema that can be followed" in said("required", tools=[wrong])
    wrong = {"type": "function", "function": {"name": "x", "parameters": {"$defs": [1]}}}
    assert "[tools] $defs of a tool must be an object" in said("required", tools=[wrong])
    wrong = {"type": "function", "function": {"name": "x", "parameters": {"type": "string"}}}
    assert "[tools] parameters are an object; got" in said("required", tools=[wrong])


def test_marks_that_are_one_token_are_known_by_their_number(tmp_path):
    """Qwen's marks are added tokens: their text never comes out of other tokens."""
    tokenizer = load_tokenizer(write_model(tmp_path / "caller", template=TEMPLATE))
    plain = tokenizer._tokenizer
    plain.add_tokens(["<tool_call>", "</tool_call>"])
    marks = plain.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
    tokenizer = TokenizerWrapper(
        plain,
        tool_call_start="<tool_call>",
        tool_call_end="</tool_call>",
        tool_parser=json_tools.parse_tool_call,
    )
    calls = calls_of(tokenizer)
    assert (calls.start, calls.end) == tuple(f"<[{mark}]>" for mark in marks)
    masks = Grammars(tokenizer, len(plain))
    mask = masks.processor(of_choice("required", [OTHER], calls), thinks=False)
    written = '{"name": "other", "arguments": {}}'
    reply = [marks[0], *plain.encode(written, add_special_tokens=False), marks[1]]
    reply.append(plain.eos_token_id)
    for at, token in enumerate(reply):
        logits = mask(mx.array(reply[:at] or [0]), mx.zeros((1, len(plain))))
        assert logits[0, token].item() == 0, (at, token)
        if at in (0, len(reply) - 1):
            assert (logits == 0).sum().item() == 1
