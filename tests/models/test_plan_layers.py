"""A preset for each layer: reports, exact layers, traced steps, saved sessions, batches."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache
from random_models import random_model, tokens
from small_models import TINY
from stepping import Twins, same_caches, small

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.chat.session import Session
from mlxkv.errors import UserError
from mlxkv.formats.plans.plan import Part, Plan
from mlxkv.formats.presets import PRESETS
from mlxkv.models import LayerReport, attach, detach, load, summarise
from mlxkv.models.catalog.reports import nothing_compressed

INT4, INT8 = PRESETS["naive-int4"], PRESETS["naive-int8"]
SMALL = {
    "exact": PRESETS["fp16"],
    "four": small(),
    "eight": small(INT8.keys, INT8.values),
    "wide": small(page=32, recent=16),
    "late": small(sink=0, recent=24),
}


def small_plan(*names: str) -> Plan:
    parts = {i: Part(name, SMALL[name]) for i, name in enumerate(names)}
    return Plan.of(Part("four", SMALL["four"]), parts)


def test_the_report_has_a_line_for_each_preset_and_one_for_all():
    model = random_model("llama", num_hidden_layers=4)
    plan = {"default": "int4", "layers": {"0": "fp16", "3": "int8"}}
    reports = attach(model, plan)
    try:
        lines = summarise(reports)
        assert lines[0] == "layer 0 (full attention): full precision, as asked for"
        assert lines[1].startswith("layers 1-2 (full attention): int4, 4.5 bits per value")
        assert lines[2].startswith("layer 3 (full attention): int8, 8.5 bits per value")
        assert (
            "plan: 8.38 bits per value, the mean of layers 0-3" in lines
        )  # (16 + 2 * 4.5 + 8.5) / 4
        kinds = [type(cache) for cache in make_prompt_cache(model)]
        assert kinds == [KVCache, *[CompressedKVCache] * 3]
    finally:
        detach(model)


def test_a_plan_of_one_preset_gives_what_the_preset_gives():
    model, text = random_model("llama"), tokens(300)
    out = []
    for kv in ("int4", {"default": "int4"}, ["int4", "int4"]):
        attach(model, kv)
        caches = make_prompt_cache(model)
        out.append(np.array(model(text[None], cache=caches)))
        detach(model)
    assert all(np.array_equal(out[0], one) for one in out[1:])


def test_each_layer_stores_what_its_own_preset_stores():
    """Layer 0 sees the same input whatever stands behind it: its pages are those of its preset alone."""
    model, text = random_model("llama"), tokens(200)
    found = {}
    for name, kv in (
        ("plan", small_plan("eight", "wide")),
        ("eight", SMALL["eight"]),
        ("exact first", small_plan("exact", "four")),
        ("fp16", PRESETS["fp16"]),
    ):
        attach(model, kv)
        found[name] = make_prompt_cache(model)
        model(text[None], cache=found[name])
        detach(model)
    same_caches(found["plan"][0], found["eight"][0], near=0)
    assert found["plan"][1].config == SMALL["wide"] and found["plan"][1].config.page == 32
    exact, fp16 = found["exact first"][0], found["fp16"][0]
    assert mx.array_equal(exact.state[0], fp16.state[0])  # to the bit


@pytest.mark.parametrize(
    "layers",
    [("four", "eight"), ("four", "wide", "four"), ("late", "four", "wide"), ("exact", "four")],
)
def test_traced_steps_keep_unlike_layers_apart(layers):
    """Layers of unlike pages and windows share no numbers in a trace; they seal at other tokens."""
    model = random_model("llama", num_hidden_layers=len(layers))
    attach(model, small_plan(*layers))
    try:
        twins = Twins(model)
        token = twins.read(tokens(70))
        for _ in range(3):
            token = twins.speak(token, 30)
            twins.read(tokens(5))
            for ours, plain in zip(twins.traced, twins.plain, strict=True):
                # Traced or not, sums round otherwise: a value at a boundary may get the next code, and a
                # bias in 16 bits the next number.
                same_caches(ours, plain, 2e-3, codes=0.01)
        assert twins.steps.state == "replayed"
    finally:
        detach(model)


def test_layers_that_a_model_does_not_have_are_refused_and_nothing_is_attached():
    model = random_model("llama")
    with pytest.raises(UserError, match="does not have; got 2; choose from 0 to 1"):
        attach(model, {"default": "int4", "layers": {"2": "int2"}})
    with pytest.raises(UserError, match="another number of layers; got 3"):
        attach(model, ["int4"] * 3)
    with pytest.raises(UserError, match="leave it out"):
        load(TINY, {"default": "int2"}, fold=True)
    assert all(type(cache) is KVCache for cache in make_prompt_cache(model))


def test_a_plan_that_only_leaves_exact_what_could_be_compressed_is_told_aloud():
    asked = LayerReport(0, "full attention", False, "as asked for")
    refused = LayerReport(1, "full attention", False, "its code needs arrays")
    assert nothing_compressed([asked, refused]) == "NOTHING IS COMPRESSED: its code needs arrays"
    assert nothing_compressed([asked]) is None


@pytest.fixture
def planned(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"default": "int4", "layers": {"3": "int2", "7": "fp16"}}))
    return load(TINY, str(file)), file


def test_sessions_name_the_plan_and_come_back_under_it_alone(planned, tmp_path):
    loaded, file = planned
    assert loaded.kv_name == "mine.json" and "kv='mine.json'" in repr(loaded)
    session = Session(loaded, max_tokens=4)
    list(session.ask("A key is in the drawer. " * 60))
    path = session.save(str(tmp_path / "talk"))
    again = Session(loaded, max_tokens=4)
    again.load(str(path))
    assert "".join(again.ask("go on")) == "".join(session.ask("go on"))

    plain = Session(load(TINY, "int4"), max_tokens=4)
    with pytest.raises(
        UserError, match="another cache; got --kv mine.json; this session runs --kv int4"
    ):
        plain.load(str(path))
    file.write_text(json.dumps({"default": "int4", "layers": {"3": "int2"}}))
    changed = Session(load(TINY, str(file)), max_tokens=4)
    with pytest.raises(UserError, match="another cache; got --kv mine.json"):
        changed.load(str(path))


def test_sequences_are_decoded_together_under_a_plan(planned):
    from mlx_lm.generate import batch_generate

    loaded, _ = planned
    prompts = [loaded.tokenizer.encode("The lamp is green. " * n) for n in (70, 45)]
    plan = {"default": "int4", "layers": {"3": "int2"}}
    attach(loaded.model, plan)
    together = batch_generate(loaded.model, loaded.tokenizer, prompts, max_tokens=8).texts
    alone = [
        batch_generate(loaded.model, loaded.tokenizer, [p], max_tokens=8).texts[0] for p in prompts
    ]
    assert together == alone
