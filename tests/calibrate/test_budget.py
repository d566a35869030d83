"""`mlxkv calibrate --budget`: what is measured, what is chosen, and where it is stored."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from random_models import VOCAB, random_model
from stepping import INT8, small

from mlxkv.calibrate import budget
from mlxkv.calibrate.options import CalibrateOptions
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact
from mlxkv.formats.names import parse_kv
from mlxkv.formats.plans.greedy import Option, allocate, evenly, mean_bits, predicted
from mlxkv.formats.plans.plan import Plan
from mlxkv.formats.presets import PRESETS
from mlxkv.models.calibration import measure
from mlxkv.models.calibration.sensitivity import Sensitivity, alone

BITS = {"fp16": 16.0, "int8": 8.5, "int4": 4.5, "int3": 3.25, "int2": 2.25}


def random_menu(random: Random, layers: int, even: bool = True) -> dict:
    """Layers whose divergence falls with the bits, each in its own way."""
    out = {}
    for layer in range(layers):
        kl = sorted(10 ** random.uniform(-6, -1) for _ in BITS)
        values = 256 if even else random.choice((128, 256, 1024))
        out[layer] = {n: Option(k, BITS[n], values) for n, k in zip(BITS, kl, strict=True)}
        out[layer]["fp16"] = Option(0.0, 16.0, values)
    return out


@pytest.mark.parametrize("seed", range(20))
def test_plans_keep_to_the_budget_and_are_near_the_best_that_there_is(seed):
    random = Random(seed)
    menu = random_menu(random, 4, even=seed % 2 == 0)
    limit = random.uniform(2.3, 9)
    chosen = allocate(menu, limit)
    assert mean_bits(menu, chosen) <= limit + 1e-6
    every = (dict(zip(menu, names, strict=True)) for names in product(BITS, repeat=4))
    best = min(predicted(menu, one) for one in every if mean_bits(menu, one) <= limit)
    uniform = [dict.fromkeys(menu, name) for name in BITS if BITS[name] <= limit]
    assert best <= predicted(menu, chosen) <= min(predicted(menu, one) for one in uniform)
    # Greedy is no exhaustive search; on these it stays within four times of it.
    assert predicted(menu, chosen) <= 4 * best


def test_a_layer_that_matters_gets_the_bits():
    menu = {i: {"int4": Option(1e-6, 4.5, 1), "int2": Option(2e-6, 2.25, 1)} for i in range(4)}
    menu[2] = {"int4": Option(1e-4, 4.5, 1), "int2": Option(1e-1, 2.25, 1)}
    assert allocate(menu, 3.0) == {0: "int2", 1: "int2", 2: "int4", 3: "int2"}
    with pytest.raises(UserError, match="choose 2.25 or more"):
        allocate(menu, 2.0)


def test_more_bits_that_do_not_help_are_not_spent():
    menu = {0: {"int4": Option(2e-6, 4.5, 1), "int2": Option(1e-6, 2.25, 1)}}
    assert allocate(menu, 16) == {0: "int2"}


def test_an_even_mix_fills_the_budget():
    menu = random_menu(Random(0), 8)
    mix = evenly(menu, 3.45)
    assert set(mix.values()) == {"int3", "int4"} and 3.25 < mean_bits(menu, mix) <= 3.45
    assert [i for i, name in mix.items() if name == "int4"] == [0]
    assert set(evenly(menu, 4.5).values()) == {"int4"}
    assert evenly(menu, 1.0) is None


@pytest.fixture
def little(tmp_path, monkeypatch):
    """A random model of three layers that is read in short windows, and presets of small pages."""
    monkeypatch.setattr(budget, "WINDOW", 256)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = random_model("llama", num_hidden_layers=3)
    loaded = SimpleNamespace(
        model=model, context=512, tokenizer=SimpleNamespace(bos_token_id=None), name="little"
    )
    presets = {"fp16": PRESETS["fp16"], "eight": small(INT8.keys, INT8.values), "four": small()}
    random = Random(1)
    text = SimpleNamespace(tokens=[random.randrange(VOCAB) for _ in range(4 * 256)], name="noise")
    return loaded, presets, text


def test_a_preset_in_one_layer_costs_what_it_costs(little, tmp_path):
    loaded, presets, text = little
    search, apart = budget.split(loaded, text)
    assert [len(search), len(apart)] == [3, 1] and {len(x) for x in search + apart} == {256}
    file = tmp_path / "kept.json"
    arms = {
        f"{name} {i}": alone(i, name, presets[name], presets["fp16"])
        for name in ("four", "eight")
        for i in range(3)
    }
    read: list[int] = []
    found = Sensitivity(loaded.model, search, file=file, progress=read.append).measure(arms)
    assert sum(read) == 6 * 3 * 256
    for i in range(3):
        assert found[f"four {i}"].shape == (3,)
        # 16 times finer steps: some 256 times less divergence, to the second order.
        assert 30 < found[f"four {i}"].mean() / found[f"eight {i}"].mean() < 2000
    exact = Sensitivity(loaded.model, search).measure({"fp16": PRESETS["fp16"]})["fp16"]
    assert (exact == 0).all()

    def never(*_):
        raise AssertionError("read again")

    again = Sensitivity(loaded.model, search, file=file)
    again._logits = never  # all is kept
    kept = again.measure(arms)
    assert all(np.array_equal(kept[name], found[name]) for name in arms)
    file.write_text('{"x": "y"}')  # not sound: measured anew
    assert Sensitivity(loaded.model, search, file=file)._known == {}


def test_a_plan_is_found_measured_and_compared(little):
    loaded, presets, text = little
    made = None  # no preset here is calibrated
    found = budget.find(loaded, made, presets, 6.0, budget.split(loaded, text))
    assert found.bits["plan"] <= 6.0 and isinstance(found.plan, Plan)
    assert {"plan", "four", "eight", "even mix of eight and four"} == set(found.kl)
    assert found.plan.at(0) in presets.values()
    # The sum of what layers cost alone foretells the plan's own divergence on other text.
    assert 0.3 < found.predicted / found.kl["plan"].mean() < 3
    assert "divergence" in budget.verdict(found)


def test_a_plan_is_compared_with_bits_by_direction(little, monkeypatch):
    loaded, presets, text = little
    monkeypatch.setattr(budget, "WINDOW", 512)  # prompts longer than the windows of the preset
    text.tokens *= 2
    made = measure.calibrate(loaded.model, text.tokens[:700])
    found = budget.find(loaded, made, presets, 6.0, budget.split(loaded, text))
    assert {"plan", "fill-6", "four", "eight"} < set(found.kl)
    assert found.bits["plan"] <= 6.0 and 5.8 < found.bits["fill-6"] <= 6.0
    assert 0 < found.kl["fill-6"].mean() < found.kl["four"].mean()
    better = {**found.kl, "fill-6": found.kl["plan"] / 9}
    bits = {**found.bits, "fill-6": found.bits["plan"]}
    assert "does NOT win: fill-6 takes" in budget.verdict(replace(found, kl=better, bits=bits))


def test_without_means_or_room_there_is_no_comparison_with_bits_by_direction(little, monkeypatch):
    loaded, _, text = little
    made = measure.calibrate(loaded.model, text.tokens[:700])
    assert budget._directions(loaded, made, 6.0) == (
        "fill-6",
        {},
    )  # its windows hold all of a prompt
    monkeypatch.setattr(budget, "WINDOW", 512)
    assert set(budget._directions(loaded, made, 6.0)[1]) == {0, 1, 2}
    assert budget._directions(loaded, None, 6.0) == ("fill-6", {})
    assert budget._directions(loaded, made, 0.5) == (
        "fill-0.5",
        {},
    )  # not one bit beside the scales
    assert budget._directions(loaded, made, 16.0) == ("fill-16", {})


def test_a_plan_that_does_not_win_is_said_to_lose(little):
    loaded, presets, text = little
    found = budget.find(loaded, None, presets, 6.0, budget.split(loaded, text))
    worse = {**found.kl, "plan": found.kl["four"] * 2}
    assert "does NOT win: even mix" in budget.verdict(replace(found, kl=worse))


def test_a_calibration_carries_its_plan(tmp_path):
    made = artifact.read("tests/data/calibration.safetensors")
    spec = {"version": 1, "default": "int4", "layers": {"0": "int2"}}
    path = tmp_path / "with.safetensors"
    artifact.write(path, replace(made, plan=spec))
    again = artifact.read(path)
    assert again.plan == spec and again.digest == made.digest
    plan = parse_kv(str(path))
    assert plan.name_at(0) == "int2" and plan.calibration == path and plan.label == path.name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"budget": 0.0}, "above 0 and up to 16"),
        ({"budget": float("nan")}, "above 0 and up to 16"),
        ({"menu": "int4,int2"}, r"\[--menu\] is for a plan"),
        ({"plan": "x.json"}, r"\[--plan\] is for a plan"),
        ({"budget": 3.0, "menu": "int4"}, "needs two presets or more"),
        ({"budget": 3.0, "menu": "int4,int9"}, "unknown preset; got 'int9'"),
        ({"budget": 3.0, "menu": "int4,x.json"}, "choose a preset here"),
        ({"budget": 3.0, "menu": "int4,int2+recent512"}, "keeps 704 tokens exact"),
        ({"budget": 3.0, "menu": "int4,fill-2.25"}, "fill-2.25 shares its bits between all layers"),
        ({"budget": 3.0, "search_clip": True}, "leave one of them out"),
        ({"budget": 3.0, "plan": "plan.txt"}, "must end in .json"),
    ],
)
def test_wrong_options_are_one_line(given, said):
    with pytest.raises(UserError, match=said) as caught:
        budget.check(CalibrateOptions(**given))
    assert "\n" not in str(caught.value)


def test_too_little_text_is_refused(little):
    loaded, _, text = little
    with pytest.raises(UserError, match="too little text for a plan; got 300"):
        budget.split(loaded, SimpleNamespace(tokens=text.tokens[:300]))


def test_a_plan_is_written_as_it_is_read(tmp_path):
    plan = parse_kv(_file(tmp_path, {"default": "int4", "layers": {"1-2": "int2"}}))
    budget.write(tmp_path / "out.json", plan)
    assert parse_kv(str(tmp_path / "out.json")) == plan


def _file(folder, data) -> str:
    (folder / "in.json").write_text(json.dumps(data))
    return str(folder / "in.json")
