"""What processes tell each other is JSON of known shapes; anything else is refused in one line."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path

import pytest
from mlx_lm import server

import mlxkv
from mlxkv.errors import MachineError
from mlxkv.serve import told
from mlxkv.serve.job import Arguments, Job
from mlxkv.serve.refusals import Refused

SAMPLING = server.SamplingArguments(0.7, 0.9, 40, 0.0, 0.0, 0.1)
LOGITS = server.LogitsProcessorArguments({3: -1.5, 7: 2.0}, 1.1, 20, 0.0, 20, 0.0, 20)


def request(**more) -> tuple:
    given = {
        **{
            "model": told.ONE,
            "sampling": SAMPLING,
            "logits": LOGITS,
            "stop_words": ["a", "\u2028"],
        },
        **{"max_tokens": 9, "num_draft_tokens": 0, "logprobs": True, "top_logprobs": -1},
        **{"seed": (1 << 63) - 1, "chat_template_kwargs": {"secret": "x"}, "job": Job(tenant="t")},
    }
    asked = server.CompletionRequest(
        "chat", "", [{"role": "user", "content": "secret"}], None, None
    )
    return asked, Arguments(**given | more)


def sent(thing):
    return told.load(told.dump(thing))


def test_a_request_arrives_without_its_text():
    assert set(told.of_request(request())) >= {f.name for f in fields(Arguments)} - set(told.APART)
    data = told.dump(told.of_request(request()))
    assert b"secret" not in data and b"pickle" not in data
    asked, args = told.to_request(told.load(data))
    assert asked == server.CompletionRequest("chat", "", [], None, None)
    assert args.job.tenant == "t" and args.chat_template_kwargs is None
    for name in ("sampling", "logits", "stop_words", "max_tokens", "seed", "logprobs"):
        assert getattr(args, name) == getattr(request()[1], name)
    assert told.to_request(sent(told.of_request(None))) is None


@pytest.mark.parametrize("rest", [(), (None,)])
def test_a_prompt_arrives(rest):
    found = ([1, 2, 3], [[1], [2, 3]], ["system", "user"], "normal", *rest)
    assert told.to_prompt(sent(told.of_prompt(found))) == found


def test_errors_arrive():
    one = told.to_error(sent(told.of_error(Refused(503, "[x] a", "b", 2, {"c": 1}))))
    assert (one.status, one.message, one.code, one.retry, one.details) == (
        503,
        "[x] a",
        "b",
        2,
        {"c": 1},
    )
    other = told.to_error(sent(told.of_error(ValueError("no"))))
    assert isinstance(other, MachineError) and "ValueError: no" in str(other)


GOOD = told.of_request(request())


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": "9"},
        {"max_tokens": True},
        {"seed": 1.5},
        {"stop_words": "a"},
        {"stop_words": [1]},
        {"sampling": {}},
        {"sampling": asdict(SAMPLING) | {"more": 1}},
        {"logits": asdict(LOGITS) | {"logit_bias": {"x": 1}}},
        {"logits": None},
        {"tenant": None},
        {"kind": 3},
        {"more": 1},
    ],
)
def test_requests_of_other_shapes_are_refused(change):
    with pytest.raises(MachineError, match="does not read"):
        told.to_request(sent(GOOD | change))


@pytest.mark.parametrize("bad", [1, "a", [], {}, [[1], [1], ["a"], "b"], {"max_tokens": 1}])
def test_other_things_are_refused(bad):
    for read in (told.to_request, told.to_prompt, told.to_error):
        with pytest.raises(MachineError, match="does not read"):
            read(sent(bad))


@pytest.mark.parametrize(
    "bad",
    [[[1], [2], ["a"], "b", []], [[1], [1], [], "b", []], [[1.5], [1], ["a"], "b", []]]
    + [[["1"], [1], ["a"], "b", []], [[1], [1], ["a"], None, []], [[1], [1], ["a"], "b", [1]]],
)
def test_prompts_of_other_shapes_are_refused(bad):
    with pytest.raises(MachineError, match="does not read"):
        told.to_prompt(sent(bad))


@pytest.mark.parametrize("data", [b"", b"\x80\x04.", b"{", b"[" * 100_000, b"\xff", b"1 2"])
def test_what_is_no_json_is_refused(data):
    with pytest.raises(MachineError, match="no JSON"):
        told.load(data)


def test_nothing_in_the_package_reads_pickles():
    for path in Path(mlxkv.__file__).parent.rglob("*.py"):
        assert "import pickle" not in path.read_text(encoding="utf-8"), path
