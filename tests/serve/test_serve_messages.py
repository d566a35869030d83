"""What processes tell each other is JSON of known shapes; anything else is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import mlxkv
from mlxkv.errors import MachineError
from mlxkv.serve import messages
from mlxkv.serve.http.request import Request
from mlxkv.serve.job import Job
from mlxkv.serve.refusals import Refused

SECRET = [{"role": "user", "content": "secret"}]
ASKED = Request(
    *(True, True, False, ["a", "\u2028"], True, -1, {3: -1.5, 7: 2.0}),
    messages=SECRET,
    chat_template_kwargs={"secret": "x"},
    user="secret",
    temperature=0.7,
    top_k=40,
    seed=(1 << 63) - 1,
    max_tokens=9,
)


def sent(thing):
    return messages.load(messages.dump(thing))


def test_a_request_arrives_without_its_text():
    data = messages.dump(messages.job_to_json(Job(ASKED, "t")))
    assert b"secret" not in data and b"pickle" not in data
    job = messages.job_from_json(messages.load(data))
    assert job.tenant == "t" and job.request.messages == [] and not job.request.chat_template_kwargs
    plain = {"messages": [], "chat_template_kwargs": None, "user": ""}
    assert job.request == replace(ASKED, **plain)
    assert messages.meeting_from_json(sent([None, [3, 4], 7])) == (None, [3, 4], 7)


def test_a_prompt_arrives():
    prompt = ([1, 2, 3], [[1], [2, 3]], ["system", "user"], "normal")
    assert messages.prompt_from_json(sent(messages.prompt_to_json(prompt))) == prompt


def test_errors_arrive():
    one = messages.error_from_json(
        sent(messages.error_to_json(Refused(503, "[x] a", "b", 2, {"c": 1})))
    )
    assert (one.status, one.message, one.code, one.retry, one.details) == (
        503,
        "[x] a",
        "b",
        2,
        {"c": 1},
    )
    other = messages.error_from_json(sent(messages.error_to_json(ValueError("no"))))
    assert isinstance(other, MachineError) and "ValueError: no" in str(other)


GOOD, TENANT = messages.job_to_json(Job(ASKED, "t"))


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": "9"},
        {"max_tokens": True},
        {"seed": 1.5},
        {"stop": "a"},
        {"stop": [1]},
        {"temperature": "1"},
        {"logit_bias": {"x": 1}},
        {"logit_bias": 7},
        {"grammar": 3},
        {"more": 1},
    ],
)
def test_requests_of_other_shapes_are_refused(change):
    with pytest.raises(MachineError, match="does not read"):
        messages.job_from_json(sent([GOOD | change, TENANT]))


@pytest.mark.parametrize("bad", [1, "a", [], {}, [[1], 1, ["a"]], [GOOD, None], {"max_tokens": 1}])
def test_other_things_are_refused(bad):
    for read in (
        messages.job_from_json,
        messages.meeting_from_json,
        messages.prompt_from_json,
        messages.error_from_json,
    ):
        with pytest.raises(MachineError, match="does not read"):
            read(sent(bad))


@pytest.mark.parametrize(
    "bad",
    [[[1], [2], ["a"], "b"], [[1], [1], [], "b"], [[1.5], [1], ["a"], "b"]]
    + [[["1"], [1], ["a"], "b"], [[1], [1], ["a"], None]],
)
def test_prompts_of_other_shapes_are_refused(bad):
    with pytest.raises(MachineError, match="does not read"):
        messages.prompt_from_json(sent(bad))


@pytest.mark.parametrize("data", [b"", b"\x80\x04.", b"{", b"[" * 100_000, b"\xff", b"1 2"])
def test_what_is_no_json_is_refused(data):
    with pytest.raises(MachineError, match="no JSON"):
        messages.load(data)


def test_nothing_in_the_package_reads_pickles():
    for path in Path(mlxkv.__file__).parent.rglob("*.py"):
        assert "import pickle" not in path.read_text(encoding="utf-8"), path
