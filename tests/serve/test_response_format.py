"""Replies that follow a JSON schema, alone, in batches and behind thinking; calls of tools that a request forces."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.tool_parsers import json_tools
from random_models import write_model
from scripted_models import ASK as WEATHER_ASK
from scripted_models import TEMPLATE, write_thinker
from serving import get, post, refused, send, serving

from mlxkv.serve import grammar, sampling
from mlxkv.serve.grammar import Grammars, calls_of, of_call
from mlxkv.serve.refusals import Refused

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "Describe a person."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["Ada", "Grace", "Søren"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def server(library, tmp_path_factory):
    """A random model: what it says follows a schema because it has to."""
    folder = write_thinker(tmp_path_factory.mktemp("format") / "random", words=200)
    with serving(folder) as server:
        yield server


def valid(text: str) -> dict:
    found = json.loads(text)
    assert set(found) == {"name", "age", "tags"} and found["name"] in ("Ada", "Grace", "Søren")
    assert type(found["age"]) is int and 0 <= found["age"] <= 120
    assert 1 <= len(found["tags"]) <= 3 and all(type(one) is bool for one in found["tags"])
    return found


def content(found: dict) -> str:
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "stop", found
    return choice["message"]["content"]


def shaped(server, form=FORMAT, messages=ASK, **more) -> str:
    asked = {"messages": messages, "response_format": form, "max_tokens": 1000} | more
    return content(post(server, CHAT, **asked))


def test_a_reply_follows_the_schema(server):
    free = post(server, CHAT, messages=ASK, max_tokens=60)["choices"][0]["message"]["content"]
    with pytest.raises(ValueError):
        json.loads(free)  # it would not by itself
    valid(shaped(server))
    assert shaped(server) == shaped(server)  # from the cache
    drawn = [valid(shaped(server, temperature=1.5, seed=seed)) for seed in range(5)]
    assert len({json.dumps(one) for one in drawn}) > 1


def test_in_a_batch_each_has_its_own(server):
    """Some follow schemas, each its own, others are free: all say what they say alone."""

    def ask(i: int):
        if i % 3 == 2:
            free = post(server, CHAT, messages=ASK, max_tokens=40)
            return free["choices"][0]["message"]["content"]
        schema = {
            "type": "object",
            "properties": {f"k{i}": {"type": "integer", "minimum": 0, "maximum": 999}},
            "required": [f"k{i}"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return shaped(server, form, [*ASK, *ASK][: 1 + i % 2])

    alone = [ask(i) for i in range(9)]
    for i in (0, 1, 3, 4, 6, 7):
        assert list(json.loads(alone[i])) == [f"k{i}"]
    with ThreadPoolExecutor(9) as pool:
        assert list(pool.map(ask, range(9))) == alone


def test_any_object_and_the_other_apis(server):
    any_object = {"response_format": {"type": "json_object"}, "max_tokens": 600}
    found = post(server, CHAT, messages=ASK, temperature=1, seed=3, **any_object)
    if found["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(content(found)), dict)
    else:  # a random model may write strings without an end
        assert found["choices"][0]["message"]["content"].lstrip().startswith("{")
    form = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
    said = post(server, "/v1/messages", messages=ASK, output_config=form, max_tokens=600)
    valid(said["content"][0]["text"])
    said = post(server, "/v1/responses", input="Describe.", text=form, max_output_tokens=600)
    valid(said["output"][0]["content"][0]["text"])
    plain = post(server, CHAT, messages=ASK, response_format={"type": "text"}, max_tokens=9)
    assert plain["choices"][0]["message"]["content"]


def test_stops_and_lengths_end_it_early(server):
    found = post(server, CHAT, messages=ASK, response_format=FORMAT, max_tokens=5)
    assert found["choices"][0]["finish_reason"] == "length"
    found = post(server, CHAT, messages=ASK, response_format=FORMAT, stop="age", max_tokens=600)
    assert found["choices"][0]["finish_reason"] == "stop"
    assert "age" not in found["choices"][0]["message"]["content"]


def test_outside_of_batches(library, model_folder):
    """As for models whose caches cannot be merged."""
    with serving(model_folder) as server:
        server.engine.is_batchable = False
        found = post(server, CHAT, messages=ASK, response_format=FORMAT, max_tokens=900)
        valid(content(found))


def test_behind_thinking_in_a_server(library, tmp_path, monkeypatch):
    """The thought is what the model likes; the reply behind it is not."""
    folder = write_thinker(tmp_path / "thinker", words=200)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    end = "<s>assistant\n{% endif %}"
    assert settings["chat_template"].endswith(end)
    settings["chat_template"] = (
        settings["chat_template"].removesuffix("{% endif %}") + "<think>{% endif %}"
    )
    path.write_text(json.dumps(settings))

    def thinks(args, tokenizer):
        left = [*tokenizer.encode("Well, {]", add_special_tokens=False), tokenizer.think_end_id]
        return lambda logprobs: mx.array([left.pop(0)]) if left else mx.argmax(logprobs, axis=-1)

    monkeypatch.setattr(sampling, "sampler_of", thinks)
    with serving(folder) as server:
        found = post(server, CHAT, messages=ASK, response_format=FORMAT, max_tokens=600)
    assert found["choices"][0]["message"]["reasoning"] == "Well, {]"
    valid(content(found))


def schema(value) -> dict:
    return {"type": "json_schema", "json_schema": {"schema": value}}


def test_what_is_no_schema_is_refused(server, subtests):
    for form, said in (
        (7, "response_format"),
        ({"type": "xml"}, "response_format"),
        ({"type": "json_schema"}, "must be a JSON schema"),
        (schema(7), "must be a JSON schema"),
        (schema({"type": "nonsense"}), "not a schema"),
        (schema({"$ref": "https://example.com/x"}), "not a schema"),
        (schema({"x-guidance": {}}), "x-guidance"),
        (schema({"enum": ["a" * 70000]}), "characters"),
        (schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "no reply can"),
    ):
        with subtests.test(said, form=str(form)[:40]):
            assert said in refused(server, 400, CHAT, messages=ASK, response_format=form)["message"]
    assert get(server, "/health") == {"status": "ok"}


def test_without_the_library_it_is_refused(monkeypatch):
    monkeypatch.setattr(grammar, "_library", lambda: None)
    with pytest.raises(Refused, match="pip install 'llguidance") as found:
        grammar.of_schema("response_format", PERSON)
    assert found.value.status == 400 and found.value.code == "not_installed"


def test_the_command_is_for_the_environment_of_the_server(monkeypatch, tmp_path):
    monkeypatch.setattr(grammar, "_library", lambda: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "pipx_metadata.json").touch()
    with pytest.raises(Refused, match=r"have; pipx inject mlxkv 'llguidance>=1.9,<2'$"):
        grammar.of_schema("response_format", PERSON)
    (tmp_path / "uv-receipt.toml").touch()
    with pytest.raises(Refused, match=r"have; uv tool install --with 'llguidance>=1.9,<2' \."):
        grammar.of_schema("response_format", PERSON)


def allowed(logits: mx.array) -> list[int]:
    return [i for i, x in enumerate(logits[0].tolist()) if x > -1e30]


def test_a_grammar_that_fails_ends_the_reply():
    broken = SimpleNamespace(
        is_stopped=lambda: False,
        is_error=lambda: True,
        get_error=lambda: "too complex",
        compute_bitmask=lambda: bytes(8),
    )
    mask = grammar.Constraint(broken, ends=[2, 3])
    assert allowed(mask(mx.array([1]), mx.zeros((1, 40)))) == [2, 3]
    assert mask.error.message.endswith("too complex")


def test_half_of_a_reply_is_not_taken_for_a_whole_one(server, library, monkeypatch):
    """llguidance gives some grammars up in the middle of a reply."""
    grammars, limits = server.engine.grammars, library.LLParserLimits(max_lexer_states=50)

    def limited(text: str):
        return library.LLMatcher(grammars._words, text, log_level=0, limits=limits)

    shaped(server)  # the words are there
    monkeypatch.setattr(grammars, "_matcher", limited)
    form = schema({"type": "string", "pattern": "^[ab]*a[ab]{300}$"})
    asked = {
        "messages": ASK,
        "response_format": form,
        "max_tokens": 400,
        "temperature": 9,
        "seed": 1,
    }
    error = refused(server, 400, CHAT, **asked)
    assert error["code"] == "too_complex" and "grew too complex" in error["message"]
    _, _, data = send(server, "POST", CHAT, asked | {"stream": True})
    assert json.loads(data.strip().splitlines()[-1][6:])["error"]["code"] == "too_complex"


# -- calls that a request forces

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


def wish(choice, tools=(CITY, OTHER), **more) -> dict:
    return {
        "messages": WEATHER_ASK,
        "tools": list(tools),
        "tool_choice": choice,
        "max_tokens": 600,
    } | more


def forced(server, choice, **more) -> dict:
    return post(server, "/v1/chat/completions", **wish(choice, **more))


def test_a_tool_is_called_where_the_request_says_so(server):
    for choice in ("required", {"type": "function", "function": {"name": "city"}}):
        (found,) = forced(server, choice, tools=[CITY])["choices"]
        (one,) = found["message"]["tool_calls"]
        assert found["finish_reason"] == "tool_calls" and one["function"]["name"] == "city"
        arguments = json.loads(one["function"]["arguments"])
        assert arguments["name"] in ("Oslo", "Bergen") and type(arguments["near"]) is bool
    chosen = {"type": "function", "function": {"name": "city"}}
    (found,) = forced(server, chosen)["choices"]
    assert found["message"]["tool_calls"][0]["function"]["name"] == "city"


def test_a_choice_that_cannot_be_followed_is_refused(server):
    def said(choice, **more):
        return refused(server, 400, "/v1/chat/completions", **wish(choice, **more))["message"]

    missing = {"type": "function", "function": {"name": "nowhere"}}
    assert "names a tool that is not among" in said(missing)
    assert "names a tool that is not among" in said("required", tools=())
    for wrong in ("sometimes", "", {}):
        assert "[tool_choice] must be auto, none, required" in said(wrong)
    assert "tool_calls" not in forced(server, None, max_tokens=2)["choices"][0]["message"]
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
    mask = masks.processor(of_call(None, [OTHER], calls), thinks=False)
    written = '{"name": "other", "arguments": {}}'
    reply = [marks[0], *plain.encode(written, add_special_tokens=False), marks[1]]
    reply.append(plain.eos_token_id)
    for at, token in enumerate(reply):
        logits = mask(mx.array(reply[:at] or [0]), mx.zeros((1, len(plain))))
        assert logits[0, token].item() == 0, (at, token)
        if at in (0, len(reply) - 1):
            assert (logits == 0).sum().item() == 1
