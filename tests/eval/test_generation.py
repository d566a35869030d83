"""The generation task: greedy text compared with the baseline's, short answers, tool calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_model import write_model
from small_models import TINY

from mlxkv.codec.codec import Codec
from mlxkv.errors import MachineError
from mlxkv.eval import feed
from mlxkv.eval.arms import Arms
from mlxkv.eval.questions import passages, tools
from mlxkv.eval.tasks import generation
from mlxkv.eval.tasks.generation import Written
from mlxkv.eval.tasks.greedy import Reply, reply
from mlxkv.eval.tasks.part import TaskOptions
from mlxkv.models import load

SMALL = TaskOptions(contexts=(768,), questions=4, tokens=24)


def run(arms: Arms, options: TaskOptions = SMALL, names=None, tasks=None) -> dict[str, dict]:
    out = {}
    for part in generation.parts(arms, options):
        if tasks is None or part.name in tasks:
            steps: list[int] = []
            out[part.name] = part.run(arms, names or arms.names, steps.append)
            assert sum(steps) == part.steps * len(names or arms.names)
    return out


def test_int4_writes_what_full_precision_writes():
    arms = Arms(load(TINY, "fp16"), ["int4"])
    found = run(arms)
    exact, small = found["agreement"]["fp16"], found["agreement"]["int4"]
    assert exact["lengths"] == exact["of"] and exact["identical"] == 1 and exact["margin"] is None
    assert len(exact["of"]) == generation.CONTINUED and max(exact["of"]) == exact["limit"] == 24
    assert exact["tokens"] > arms.configs["int4"].window
    assert small["mean"] >= 0.5 * exact["mean"]
    for name in arms.names:
        answers, calls = found["answers"][name], found["structured"][name]
        assert answers["asked"] == 2
        groups = answers["by_group"].values()
        assert sum(group["right"] for group in groups) == answers["right"]
        assert calls["asked"] == 2 and calls["right"] <= calls["valid"] <= 2
        assert -20 < calls["likelihood"] < 0
    assert found["structured"]["fp16"]["same"] == 2


def test_a_broken_cache_is_found_out(monkeypatch):
    encode = Codec.encode
    monkeypatch.setattr(Codec, "encode", lambda self, x, way: encode(self, x[..., ::-1], way))
    arms = Arms(load(TINY, "fp16"), ["int4"])
    # The baseline is not asked for: it is made all the same.
    longer = replace(SMALL, tokens=40)
    found = run(arms, longer, names=["int4"], tasks=("agreement",))["agreement"]
    assert set(found) == {"int4"}
    assert found["int4"]["identical"] <= 0.5
    assert found["int4"]["mean"] < 36 and found["int4"]["margin"] > 0


@pytest.mark.parametrize("template", [True, False])
def test_plain_questions_run_on_any_model(tmp_path, template, model_folder):
    folder = model_folder if template else write_model(tmp_path / "raw", template=None)
    arms = Arms(load(str(folder), "fp16"), [])
    found = run(arms, TaskOptions(contexts=(900,), questions=1, tokens=8))
    assert found["agreement"]["fp16"]["identical"] == 1
    assert found["answers"]["fp16"] == found["answers"]["fp16"] | {"asked": 1, "right": 0}
    assert found["structured"]["fp16"]["valid"] == 0


def written(tokens: list[int], margins: list[float]) -> Written:
    return Written(Reply(tokens, margins, ""))


def test_replies_stop_where_they_should(loaded):
    def ask(limit, **how):
        return reply(loaded, feed.prefill(loaded, [5, 6, 7]), [8, 9], limit, **how)

    loaded.tokenizer.eos_token_ids = {258}  # never written here
    whole = ask(12)
    assert len(whole.tokens) == len(whole.margins) == 12 and min(whole.margins) >= 0
    assert ask(12) == whole
    assert ask(12, enough=lambda text: len(text) >= 3).tokens == whole.tokens[:3]
    assert "\n" not in ask(12, line=True).text
    loaded.tokenizer.eos_token_ids = {whole.tokens[4]}
    stopped = ask(12)
    assert stopped.tokens == whole.tokens[: whole.tokens.index(whole.tokens[4]) + 1]


def test_broken_logits_are_a_fault(tmp_path):
    loaded = load(str(write_model(tmp_path / "poison", poison=True)), "fp16")
    with pytest.raises(MachineError, match="NaN or infinity in the logits"):
        reply(loaded, feed.prefill(loaded, [1, 2]), [3], 4)


def test_what_is_no_call(subtests):
    for text in [
        "",
        "no",
        "[1]",
        '{"tool": "a"}',
        '{"tool": 1, "arguments": {}}',
        '{"tool": "a", "arguments":',
    ] + ['{"tool": "a", "arguments": {}, "more": 1}', '{"tool": "a", "arguments": []}']:
        with subtests.test(text=text):
            assert tools.parse(text) is None


def test_right_answers_to_passages():
    (one,) = [q for q in passages.questions(99) if q.answer == "five"]
    assert one.right("Five lamps were broken.") and one.right(" five\nQuestion: Why?")
    assert not one.right("Twelve.") and not one.right("Fivefold")
    assert not one.right(" ".join(["five"] * 20))
