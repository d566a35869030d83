"""The retrieval task: facts are spread over the text, and scores fall if the cache is broken."""

import re
from random import Random

import mlx.core as mx
import numpy as np
import pytest
from random_models import write_model
from small_models import TINY

from mlxkv.errors import MachineError
from mlxkv.eval import questions as texts
from mlxkv.eval import retrieval
from mlxkv.eval.arms import Arms
from mlxkv.eval.engine import TaskOptions
from mlxkv.eval.questions import KINDS, QUERIES, Question
from mlxkv.generate import reading
from mlxkv.loading.load import load

SMALL = TaskOptions(contexts=(768,), questions=3, samples=2)


def words(text: str) -> int:
    return len(text.split())


def test_facts_stand_all_over_the_text():
    document = texts.document(Random(1), 3000, 16, words)
    assert texts.document(Random(1), 3000, 16, words) == document
    assert 0.9 * 3000 <= words(document.text) <= 1.05 * 3000
    places = []
    for question in document.questions:
        for key, value in zip(question.keys, question.values, strict=True):
            before, _, after = document.text.partition(value)
            assert before.lower().endswith(f" {key.lower()} is ") and value not in after
            places.append(len(before) / len(document.text))
    assert np.histogram(places, 5, (0, 1))[0].min() > len(places) / 10


def test_every_kind_asks_for_its_values():
    document = texts.document(Random(3), 2000, 8, words)
    for kind in KINDS:
        asked = document.of(kind)
        assert len(asked) == 8
        for question in asked:
            wanted = {"multi-query": (QUERIES,), "multi-value": (2, 3)}.get(kind, (1,))
            assert len(question.values) in wanted
            keys = 1 if kind == "multi-value" else len(question.values)
            assert len(set(question.keys)) == keys
            cursor = 0
            for value in question.values:
                cursor = question.answer.index(value, cursor) + len(value)
    several = document.of("multi-value")[0]
    key = re.compile(rf"(?i:{several.keys[0]})(?! [A-Z])")  # a surname makes another
    told = [s for s in re.split(r"(?<=\.)\s", document.text) if key.search(s)]
    assert sorted(several.values) == sorted(code for s in told for code in re.findall(r"\d+", s))


def run(arms: Arms, options: TaskOptions = SMALL, kinds=KINDS) -> dict[str, dict]:
    """Results by kind of question, then by arm."""
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval, "KINDS", tuple(kinds))
        parts = retrieval.parts(arms, options)
        found = [dict(part.run(arms, arms.names, steps.append)) for part in parts]
    assert sum(steps) == len(kinds) * options.questions * len(arms.names)
    return {
        kind: {
            name: retrieval.pooled(kind, parts[0].context, [by_name[name] for by_name in found])
            for name in arms.names
        }
        for kind in kinds
    }


def test_int4_finds_what_full_precision_finds():
    found = run(Arms(load(TINY, "fp16"), ["int4"]), kinds=("multi-value",))["multi-value"]
    exact, small = found["fp16"], found["int4"]
    # This model copies codes when it is told to write them, but finds few by itself in such English.
    assert exact["likelihood"] > -3 and 0 < abs(small["likelihood"] - exact["likelihood"]) < 0.1
    assert small["kv_bytes"] < 0.5 * exact["kv_bytes"]
    assert 500 < exact["tokens"] < 768
    for result in (exact, small):
        assert result["kind"] == "multi-value" and result["questions"] == 3
        values = [value for each in result["documents"] for value in each]
        assert len(result["documents"]) == 2 and sum(values) / len(values) == result["values"]


def test_questions_are_dealt_over_documents(subtests):
    for questions, samples, asked in [
        (16, 8, [2] * 8),
        (3, 8, [1] * 3),
        (10, 4, [3, 3, 2, 2]),
        (40, 1, [14, 13, 13]),
    ]:
        with subtests.test(questions=questions, samples=samples, asked=asked):
            options = TaskOptions(questions=questions, samples=samples)
            assert retrieval.asked_of(options) == asked


def test_a_model_without_a_template_is_asked(tmp_path):
    arms = Arms(load(str(write_model(tmp_path / "raw", template=None)), "fp16"), ["int4"])
    found = run(arms, TaskOptions(contexts=(900,), questions=1), ("multi-value",))
    for result in found["multi-value"].values():
        assert result["values"] == 0  # random weights
        assert -20 < result["likelihood"] < -2


def test_values_are_scored_at_their_own_tokens(loaded):
    prompt, answer = [5, 6, 7, 8], " It is 12, or 345."
    tokens = retrieval.encode(loaded, answer)
    found = retrieval.score(
        loaded, reading.prefill(loaded, prompt[:2]), prompt[2:], answer, ("12", "345")
    )
    logits = np.array(loaded.model(mx.array([prompt + tokens]))[0].astype(mx.float32))
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    exact = [logs[len(prompt) + i - 1, token] for i, token in enumerate(tokens)]
    for span, scores in zip(retrieval.spans(loaded, tokens, ("12", "345")), found, strict=True):
        assert scores == pytest.approx([exact[i] for i in span], abs=5e-3)


def test_values_are_found_in_free_words(subtests, monkeypatch, loaded):
    for text, right in [
        ("They are 7654321 and 1,234,567.", [True, True]),
        ("7654321", [False, True]),
        ("1234567, 17654321", [True, False]),
        ("", [False, False]),
    ]:
        with subtests.test(text=text, right=right):
            monkeypatch.setattr(retrieval, "greedy", lambda *_, text=text: text)
            question = Question("multi-value", "", "", ("1234567", "7654321"), ("a", "a"))
            assert retrieval._found(loaded, [], [], question) == right


def test_replies_stop_where_they_should(loaded):
    def ask(limit, **how):
        return retrieval.greedy(loaded, reading.prefill(loaded, [5, 6, 7]), [8, 9], limit, **how)

    loaded.tokenizer.eos_token_ids = {258}  # never written here
    text = ask(12)
    assert ask(12) == text and text.startswith(ask(5)) and len(ask(5)) < len(text)
    short = ask(12, enough=lambda written: len(written) >= 3)
    assert text.startswith(short) and 3 <= len(short) < len(text)
    assert "\n" not in ask(12, line=True)
    loaded.tokenizer.eos_token_ids = {retrieval.encode(loaded, text[0])[0]}
    assert ask(12) == ""


def test_broken_logits_are_a_fault(tmp_path):
    loaded = load(str(write_model(tmp_path / "poison", poison=True)), "fp16")
    with pytest.raises(MachineError, match="NaN or infinity in the logits"):
        retrieval.greedy(loaded, reading.prefill(loaded, [1, 2]), [3], 4)
