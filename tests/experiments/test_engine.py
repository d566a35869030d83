"""What the experiment on vLLM computes of what an engine gives it."""

import math
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import engine


def test_speed_is_that_of_the_steps_in_which_all_requests_run():
    """Two requests, of which the second starts 40 steps late, at half the speed: prefills count for nothing."""
    steps, done = [], [0, 0]
    clock = 0.0
    while min(done) < engine.STEPS:
        running = [i for i in (0, 1) if done[i] < engine.STEPS and (i == 0 or done[0] >= 40)]
        clock += 5.0 if running == [0, 1] and not done[1] else 0.25 if len(running) == 2 else 0.5
        for i in running:
            done[i] += 1
        steps.append((clock, list(done)))
    assert engine.rate(steps) == pytest.approx(8.0)  # two tokens a quarter of a second


def reply(*steps: dict[int, float]) -> SimpleNamespace:
    """Return what vLLM gives of tokens, each the likeliest of a step's log probabilities."""
    logprobs = [{t: SimpleNamespace(logprob=x) for t, x in step.items()} for step in steps]
    return SimpleNamespace(token_ids=[max(x, key=x.__getitem__) for x in steps], logprobs=logprobs)


def test_the_gap_is_that_of_the_first_other_token():
    alone = reply({7: -0.1}, {8: -0.5, 5: -2.0}, {9: 0.0})
    sure = {7: -0.1}
    assert engine.parted(reply(sure, {5: -0.2}, {4: 0.0}), alone)[:2] == (1, 1.5)
    assert engine.parted(reply(sure, {6: -0.2}, {9: 0.0}), alone)[:2] == (1, math.inf)
    assert engine.parted(alone, alone) == (engine.NEW, 0.0, [0.0] * 3)
    # One that was given the first token, and what each step's distribution lost up to the other token.
    resumed = engine.parted(reply({8: math.log(0.25), 5: math.log(0.125)}, {1: 0.0}), alone, 1)
    p, q = {8: -0.5, 5: -2.0}, {8: math.log(0.25), 5: math.log(0.125)}
    assert resumed[:2] == (2, math.inf) and resumed.kl[0] == engine.divergence(p, q) > 0


def test_texts_that_part_are_told_by_request():
    whole, other = (
        engine.Parted(engine.NEW, 0.0, [0.0] * engine.NEW),
        engine.Parted(16, 1.375, [0.01] * 16 + [0.64]),
    )
    made = engine.told({3: whole, 5: other}, "behind_")
    assert made == {
        "behind_same_texts": 1,
        "behind_widest_gap": 1.375,
        "behind_same_tokens": 62.5,
        "behind_kl": round(0.8 / 81, 5),
        "behind_kl_most": 0.64,
        "behind_others": [(5, 16, 1.375, 0.64, 0.01)],
        "behind_kl_of": {3: 0.0, 5: round(0.8 / 17, 5)},
    }
    assert engine.told({}, "")["widest_gap"] == 0.0


def test_rows_that_are_not_finite_say_so():
    row = {"cache": "x", "model": "m", "engine": "vllm", "texts": 6, "tokens": 24, "nll_lost": 1.0}
    (_, _, line) = engine.quality_table(
        [row | {"same_of": [1, 2, 3] * 2, "kl_of": [0.1] * 5 + [math.nan]}]
    ).split("\n")
    assert "| not finite |" in line


def test_next_tokens_are_compared_by_text():
    options = Namespace(cache="int4", model=Path("m"), dtype="float32")
    p = {1: math.log(0.5), 2: math.log(0.25)}
    q = {1: math.log(0.25), 2: math.log(0.5)}
    row = engine.compared(
        options, [[(1, p), (1, p)], [(2, p)] * 2], [[(1, p), (1, q)], [(2, p)] * 2]
    )
    assert row["same_of"] == [1, 2] and row["same_next"] == 75.0
    # 1/2 ln 2 - 1/4 ln 2, in one of four places; the others as one lose nothing.
    assert row["kl_of"] == [pytest.approx(math.log(2) / 8, abs=1e-6), 0.0]
    assert row["widest_gap"] == pytest.approx(math.log(2), abs=1e-3)
    assert row["nll_lost"] == pytest.approx(math.log(2) / 4, abs=1e-4)
