"""Requests: any body is refused, or has the types that mlx-lm reads."""

import inspect
import json
from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_sampler
from request_bodies import BODIES, FIELDS, GOOD, MODEL_INFO, VOCABULARY, check, read
from transformers import PreTrainedTokenizerBase

from mlxkv.catalog.option_checks import RESERVED
from mlxkv.loading.sampling import Sampling
from mlxkv.serve.apis import body as bodies
from mlxkv.serve.apis import openai
from mlxkv.serve.refusals import Refused
from mlxkv.serve.request import Request
from mlxkv.serve.sampling import finite


def parse(raw: bytes, chat: bool) -> Request:
    return read(bodies.document(raw), chat)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(BODIES, st.booleans())
def test_any_body_is_refused_in_one_line_or_has_the_right_types(body, chat):
    try:
        out = check(body, chat)
    except Refused as refused:
        assert refused.status in (400, 404) and "\n" not in refused.message
        assert refused.message.startswith("[") and len(refused.message) < 300
        return
    for name in bodies.SAMPLING:
        assert type(out[name]) in (int, float) or out[name] is None
        assert not isinstance(out[name], float) or abs(out[name]) <= 100
    assert type(out["stream"]) is type(out["include_usage"]) is bool
    assert all(type(word) is str and word for word in out["stop"])
    assert type(out["logprobs"]) is bool and -1 <= out["top_logprobs"] <= 20
    assert all(0 <= token < VOCABULARY for token in out["logit_bias"] or ())
    assert not set(out["chat_template_kwargs"] or ()) & set(RESERVED)
    if not chat:
        prompt = out["prompt"]
        assert prompt and (type(prompt) is str or all(0 <= x < VOCABULARY for x in prompt))
        return
    for message in out["messages"]:
        assert (
            message["role"] in ("system", "user", "assistant", "tool")
            and type(message["content"]) is str
        )
        for call in message.get("tool_calls", ()):
            assert type(call["function"]["arguments"]) is str


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes_are_refused_as_a_body(raw):
    """Those that are JSON objects have no prompt."""
    with pytest.raises(Refused, match=r"\[(body|prompt)\]") as found:
        parse(raw, False)
    assert found.value.status == 400


LIMITS = {
    "temperature": (True, -0.1),
    "top_p": (1.01,),
    "max_tokens": (0, 1.0, -2, True, "7"),
    "max_completion_tokens": (0, -2),
    "seed": ("1", 1 << 63, -(1 << 63) - 1),
    "stop": ("", ["a"] * 17, ["a" * 257]),
    "stream": (1,),
    "continue_final_message": (1, "yes"),
    "logit_bias": ({"260": 1}, {"²": 1}, {"1": 1e300}),
    "top_logprobs": (21,),
    "response_format.type": ({"type": "xml"},),
    "n": (True,),
    "user": (1,),
    "cache_salt": ("a" * 513,),
    "kv": ("int8", ["int4"]),
    "repetition_penalty": (5e-324, 1e-300, 1e-45, 0.0099, 101, -1),
    # Padding alone could ask for a prompt of a billion tokens.
    "chat_template_kwargs": ({"padding": 1}, {"return_tensors": 1}, {"max_length": 1}),
}
# Marks of calls and special tokens would end a call.
NO_NAMES = ("", "<s>", "</tool_call>", "a b", "a\n", '"', "{{x}}", "<|im_end|>", "a" * 513, 7, None)
TYPING_ERRORS = {
    "temprature": "temperature",
    "max_token": "max_tokens",
    "top-k": "top_k",
    "message": "messages",
    "tools\x1b\n": "tools",
}


def named(name: object) -> dict:
    """A request with a tool of this name."""
    return GOOD | {"tools": [{"type": "function", "function": {"name": name}}]}


def test_each_limit_holds(subtests):
    for field, values in LIMITS.items():
        for value in values:
            with subtests.test(field, value=value), pytest.raises(Refused, match=rf"\[{field}\]"):
                check(GOOD | {field.partition(".")[0]: value}, True)
    for name in NO_NAMES:
        with subtests.test("tool", name=name), pytest.raises(Refused) as found:
            check(named(name), True)
        assert found.value.message.startswith("[tools.0.function.name] must be")
    for good in ("get_weather", "mcp__files-2.read:all/x@1", "wetter_für"):
        assert check(named(good), True)
    assert check(GOOD | {"repetition_penalty": 0.01}, True)["repetition_penalty"] == 0.01
    own = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    assert set(RESERVED) >= own - {"kwargs"}
    assert check(GOOD | {"chat_template_kwargs": {"enable_thinking": False}}, True)


def test_names_that_are_almost_ours_are_refused():
    for name, meant in TYPING_ERRORS.items():
        with pytest.raises(Refused, match="no such field") as found:
            check(GOOD | {name: 1}, True)
        said = found.value.message
        assert found.value.status == 400 and found.value.code == "unknown_parameter"
        assert said.isprintable() and said.startswith("[") and f"did you mean {meant}?" in said


def test_fields_of_other_servers_change_nothing():
    """Those of OpenAI's client, which are taken or have a refusal of their own, or are dropped; and names close to
    ours that mean other things elsewhere."""
    types = pytest.importorskip("openai.types")
    chat = types.chat.completion_create_params.CompletionCreateParamsBase
    text = types.completion_create_params.CompletionCreateParamsBase
    names = {*inspect.get_annotations(chat), *inspect.get_annotations(text)}
    assert len(names) > 30
    names |= bodies.LOOKALIKES | {"mirostat", "num_ctx", "", "\x1b[31mred\n", "x" * 5000}
    want = check(GOOD, True)
    for name in sorted(names - {*FIELDS}):
        assert check(GOOD | {name: {"anything": [1]}}, True) == want


def test_a_request_has_so_many_fields_and_values():
    few, many = [[[1] * 99] * count for count in (900, 1001)]
    assert check_document(metadata=few)["metadata"] == few
    with pytest.raises(Refused, match=r"^\[body\] at most 100000 values"):
        check_document(metadata=many)
    with pytest.raises(Refused, match=r"^\[body\] at most 256 fields; got 300"):
        check_document(**{f"x{i}": 1 for i in range(300)})


def check_document(**body) -> dict:
    return bodies.document(json.dumps(body).encode())


HUGE = ("1e400", "-1e999", "Infinity", "-Infinity", "NaN", "1" + "0" * 400, "9" * 5000)
PLACES = {
    "metadata.a.1": '"metadata": {"a": [1, %s]}',
    "tools.0.function.parameters.default": '"tools": [{"function": {"name": "f", "parameters": {"default": %s}}}]',
    "response_format.json_schema.schema.maximum": '"response_format": {"json_schema": {"schema": {"maximum": %s}}}',
    "text.format.x": '"text": {"format": {"x": %s}}',
    "temperature": '"temperature": %s',
    "messages.0.content.0.b": '"messages": [{"role": "user", "content": [{"b": %s}]}]',
    "\ufffd": '"\\u001b": %s',
}  # fmt: skip


def test_numbers_that_are_none_are_refused_with_their_place(subtests):
    for place, text in PLACES.items():
        for number in HUGE:
            with subtests.test(place, number=number[:9]), pytest.raises(Refused) as found:
                parse(("{%s}" % (text % number)).encode(), True)
            assert found.value.message.startswith(
                f"[{place}] must be a number from -1.7976931348623157e+308"
            )


@pytest.mark.parametrize("depth", [bodies.DEPTH - 2, bodies.DEPTH + 1, 976, 980, 5000])
def test_nested_bodies(depth):
    """Lists and objects."""
    nested = (b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth)
    for inside in nested:
        raw = b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "metadata": %s}'
        if depth < bodies.DEPTH:
            assert parse(raw % inside, True).messages
        else:
            with pytest.raises(Refused, match=r"\[body\] nested too deeply; at most 64 levels"):
                parse(raw % inside, True)
    for content in nested:
        with pytest.raises(Refused, match=r"\[(body|messages.0.content)"):
            raw = b'{"messages": [{"role": "user", "content": %s}]}'
            parse(raw % content, True)


def test_settings_that_16_bits_cannot_divide_by():
    """What is colder is greedy; the least `top_p` is not all of them, as 0 is."""
    for cold in (0, 1e-320, 1e-45, 1e-40, 1e-38, 1e-7, 9e-4):
        assert check(GOOD | {"temperature": cold}, True)["temperature"] == 0.0
    assert check(GOOD | {"temperature": 1e-3}, True)["temperature"] == 1e-3
    for top_p in (5e-324, 1e-45, 1e-7):
        assert check(GOOD | {"top_p": top_p}, True)["top_p"] == bodies.LEAST_TOP_P
    assert check(GOOD | {"top_p": 0}, True)["top_p"] == 0


def test_the_coldest_temperature_still_draws_the_best_token():
    """In 16 bits, where the best is as unlikely as it can be, and at the least `top_p`."""
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        logits = mx.zeros((1, 50_000), dtype=dtype)
        logits[0, 7] = 0.5
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        for settings_ in ({"temp": bodies.COLDEST}, {"temp": 1.0, "top_p": bodies.LEAST_TOP_P}):
            draw = make_sampler(**settings_)
            assert {draw(logprobs).item() for _ in range(4)} == {7}


def test_log_probabilities_are_numbers_of_json():
    inf, nan = float("inf"), float("nan")
    want = [-1.5, -9999.0, None, None, -9999.0, 0.0]
    assert [finite(x) for x in (-1.5, -inf, inf, nan, -1e30, 0.0)] == want


def test_what_clients_send_is_taken():
    """Nulls, integers for numbers, and the roles and parts of OpenAI's clients."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
    ]
    more = {"model": "m", "kv": "int4", "temperature": 1, "top_p": None, "n": 1}
    more |= {"max_tokens": 10_000, "user": "someone", "response_format": {"type": "text"}}
    out = check({"messages": messages, **more}, True)
    assert [m["role"] for m in out["messages"]] == ["system", "user", "assistant", "tool"]
    assert [m["content"] for m in out["messages"]] == ["be brief", "a", "", "7"]
    assert out["max_tokens"] == 100 and out["top_p"] == 1 and out["user"] == "someone"
    text = check({"prompt": ["a"], "logprobs": 3}, False)
    assert (text["prompt"], text["logprobs"], text["top_logprobs"]) == ("a", True, 3)


def test_prompts_of_tokens():
    """Alone, or as the one prompt of a list; they are of the vocabulary."""
    for prompt in ([7, VOCABULARY - 1], [[7, VOCABULARY - 1]]):
        assert check({"prompt": prompt}, False)["prompt"] == [7, VOCABULARY - 1]
    assert check({"prompt": [7]}, False)["prompt"] == [7]
    for prompt in ([VOCABULARY], [-1], [1.0], [True], [[1], [2]], [], [[]], [["a"]], [1, "a"]):
        with pytest.raises(Refused, match=r"^\[prompt\] must "):
            check({"prompt": prompt}, False)


def test_a_negative_seed_is_any():
    assert [check(GOOD | {"seed": x}, True)["seed"] for x in (-1, -12345, 0, 7)] == [
        None,
        None,
        0,
        7,
    ]


@pytest.mark.parametrize(
    "field, value, bound",
    [
        ("seed", 1 << 63, "9223372036854775807"),
        ("top_k", -1, "1048576"),
        ("max_tokens", 0, "16777216"),
        ("xtc_threshold", 1, "0.5"),
    ],
)
def test_bounds_are_told_in_full(field, value, bound):
    with pytest.raises(Refused, match=rf"to {bound}; got"):
        check(GOOD | {field: value}, True)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_longest_reply(name):
    """As asked for, at most the context; -1 is all of it, or what memory holds; SERVED's, or that, where
    nothing is said."""
    found = {
        value: [check(GOOD | {name: value}, True)[key] for key in ("max_tokens", "shorten")]
        for value in (7, 100, 5000, -1)
    }
    assert found == {7: [7, False], 100: [100, False], 5000: [100, False], -1: [100, True]}
    said = check(GOOD, True)
    assert (said["max_tokens"], said["shorten"]) == (MODEL_INFO.max_tokens, True)
    assert check(GOOD | {"max_tokens": 9, "max_completion_tokens": 7}, True)["max_tokens"] == 7


def test_what_the_makers_ask_for_is_what_a_request_does_not_say():
    model_info = replace(MODEL_INFO, sampling=Sampling(temperature=0.6, top_p=0.9, top_k=20))
    found = openai.read_chat(GOOD | {"temperature": 0, "top_k": 0}, model_info)
    assert (found.temperature, found.top_p, found.top_k) == (0.0, 0.9, 0)
