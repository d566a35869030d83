"""Value rotations in the weights: the same tokens, the weights back bit by bit, caches that follow."""

import dataclasses
import gc

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from calibration_inputs import TEXT, logits
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from on_emulator import make_tiles
from random_models import random_model
from small_models import TINY

from mlxkv.cache import attention
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.calibration import clips, measure
from mlxkv.catalog.reports import summarise
from mlxkv.codec import maps
from mlxkv.errors import UserError
from mlxkv.formats.names import parse_kv
from mlxkv.formats.presets import PRESETS
from mlxkv.formats.session import Saved
from mlxkv.generate import prompt_cache
from mlxkv.loading.attach import attach, detach
from mlxkv.loading.load import load
from mlxkv.metal import launch
from mlxkv.patching import fold
from mlxkv.patching.fold import match_fold
from mlxkv.patching.trees import leaves
from mlxkv.spec.bounds import rms

pytestmark = pytest.mark.usefixtures("trusted")

WINDOWS = {"sink": 16, "recent": 16, "page": 16}  # small ones, so that pages are quantized early
INT4, INT2 = (
    dataclasses.replace(PRESETS[name], **WINDOWS) for name in ("oscar-int4", "oscar-int2")
)
GATE = "a gate or a norm comes between"
VALUES = "values are not the output of a linear map"
TWICE = "its values are read more than once"


def spoken(model) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(TEXT[:80]), model, max_tokens=12)]


def weights(model) -> dict[str, np.ndarray]:
    return {k: np.array(x.view(mx.uint8)) for k, x in tree_flatten(model.parameters())}


def folds(reports) -> list[str]:
    return [report.fold for report in reports if report.compressed]


@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama", {"num_key_value_heads": 4, "attention_bias": True}),
        ("phi3", {}),
        ("falcon_h1", {}),
    ],
)
def test_folded_weights_say_the_same(family, changes):
    model = random_model(family, **changes)
    made = measure.calibrate(model, TEXT[:512])
    before, plain_weights = weights(model), logits(model)
    attach(model, INT4, calibration=made)
    plain, tokens = logits(model), spoken(model)
    reports = attach(model, INT4, calibration=made, fold=True)
    assert folds(reports) and set(folds(reports)) == {"folded"}
    assert "values transformed by the weights" in summarise(reports)[-1]
    changed = {k for k, x in weights(model).items() if not np.array_equal(x, before[k])}
    assert len(changed) >= 2 * len(folds(reports))
    cache = make_prompt_cache(model)
    ours = [c for _, c in leaves(cache) if "Compressed" in type(c).__name__]
    # A code at a rounding boundary may fall the other way.
    assert rms(logits(model, cache), plain) < 1e-3
    assert spoken(model) == tokens
    assert ours and all(c.store.codecs[1].transform is None for c in ours)
    assert all(c.store.codecs[0].transform is c.layer_maps.keys for c in ours)
    detach(model)
    assert rms(logits(model), plain_weights) < 1e-4  # still folded: the same function


def test_16_bit_weights():
    model, dtype = random_model("gemma3_text"), mx.bfloat16
    made = measure.calibrate(model, TEXT[:512])
    model.set_dtype(dtype)
    plain = np.array(model(mx.array(TEXT[:90])[None]).astype(mx.float32))
    reports = attach(model, INT2, calibration=made, fold=True)
    assert set(folds(reports)) == {"folded"}
    assert all(x.dtype == dtype for _, x in tree_flatten(model.parameters()))
    detach(model)
    folded = np.array(model(mx.array(TEXT[:90])[None]).astype(mx.float32))
    assert 0 < rms(folded, plain) < fold.BOUNDS[dtype]


@pytest.mark.parametrize(
    "family, reason",
    [("qwen3_next", GATE), ("gemma3n", VALUES), ("gemma4_text", TWICE)],
)
def test_what_cannot_be_folded_says_why(family, reason):
    model = random_model(family)
    before = weights(model)
    made = measure.calibrate(model, TEXT[:512])
    reports = attach(model, INT4, calibration=made, fold=True)
    assert any(reason in text for text in folds(reports))
    assert "folded" not in folds(reports)
    assert any(f"values transformed at run time ({reason}" in line for line in summarise(reports))
    assert all(np.array_equal(x, before[k]) for k, x in weights(model).items())
    detach(model)


def test_quantised_weights_stay_and_others_are_folded():
    model = random_model("llama")
    made = measure.calibrate(model, TEXT[:512])
    nn.quantize(model, 64, 8, class_predicate=lambda path, _: path.endswith("0.self_attn.o_proj"))
    attach(model, INT4, calibration=made)
    plain = logits(model)
    reports = attach(model, INT4, calibration=made, fold=True)
    assert folds(reports) == ["the weights of outputs are quantised", "folded"]
    assert rms(logits(model), plain) < 1e-3
    detach(model)


def test_a_fold_that_changes_the_model_is_undone(monkeypatch):
    """The check is what decides: here the columns of one layer get another head's rotation."""
    model = random_model("llama")
    made = measure.calibrate(model, TEXT[:512])
    before, right = weights(model), fold._replace

    def wrong(site, transform):
        first = site.target is model.layers[0].self_attn.o_proj
        blocks = site.blocks[::-1] if first else site.blocks
        return right(dataclasses.replace(site, blocks=blocks), transform)

    monkeypatch.setattr(fold, "_replace", wrong)
    reports = attach(model, INT4, calibration=made, fold=True)
    assert folds(reports)[0].startswith("the output of its attention changed by")
    assert folds(reports)[1] == "folded"
    now = weights(model)
    assert all(np.array_equal(now[k], before[k]) for k in before if ".0.self_attn" in k)
    detach(model)


def test_shared_weights_are_left_alone():
    model = random_model("llama")
    model.layers[1].self_attn.o_proj = model.layers[0].self_attn.o_proj
    made = measure.calibrate(model, TEXT[:512])
    reports = attach(model, INT4, calibration=made, fold=True)
    assert folds(reports) == ["its weights serve other layers too"] * 2
    detach(model)


@pytest.fixture(scope="module")
def model():
    return random_model("qwen2")


@pytest.fixture(scope="module")
def made(model):
    return measure.calibrate(model, TEXT[:512])


def test_attaching_again_folds_once(made, capsys):
    model = random_model("qwen2")
    plain = logits(model)
    attach(model, INT4, calibration=made, fold=True)
    once = weights(model)
    for config, again in ((INT2, True), (INT2, False), ("int4", False), ("fp16", False)):
        reports = attach(model, config, calibration=made, fold=again)
        assert set(folds(reports)) <= {"folded"}
        assert all(np.array_equal(x, once[k]) for k, x in weights(model).items())
    assert rms(logits(model), plain) < 1e-4
    attach(model, INT4, calibration=made)
    assert {c.layer_maps.folded for c in make_prompt_cache(model)} == {True}
    assert capsys.readouterr().err == ""
    detach(model)
    assert "the weights stay folded" in capsys.readouterr().err
    attach(model, INT4, calibration=made)  # the model knows it, attached or not
    assert {c.layer_maps.folded for c in make_prompt_cache(model)} == {True}
    detach(model)


def test_other_maps_of_values_are_refused(made):
    model = random_model("qwen2")
    attach(model, INT4, calibration=made, fold=True)
    other = measure.calibrate(random_model("qwen2", seed=1), TEXT[:512])
    for kv, calibration in (("balanced-int3", made), ("oja-0.75", made), (INT4, other)):
        with pytest.raises(UserError, match="weights of this model transform values by oscar maps"):
            attach(model, kv, calibration=calibration)
        assert make_prompt_cache(model)[0].config == INT4  # left as it was
    keys_only = dataclasses.replace(parse_kv("balanced-int3/int4"), **WINDOWS)
    attach(model, keys_only, calibration=made)
    assert {c.layer_maps.folded for c in make_prompt_cache(model)} == {False}
    detach(model)


def test_a_folded_model_is_not_calibrated(made):
    model = random_model("qwen2")
    attach(model, INT4, calibration=made, fold=True)
    for attached in (True, False):
        with pytest.raises(UserError, match=r"\[calibrate\] the weights .* load the model again"):
            measure.calibrate(model, TEXT[:512])
        with pytest.raises(UserError, match=r"\[search-clip\] the weights"):
            clips.search(model, made, INT2, TEXT)
        if attached:
            detach(model)


@pytest.mark.parametrize(("saved", "count"), ((False, 100), (True, 20)))
def test_saved_caches_go_to_models_of_the_other_kind(made, saved, count, tmp_path):
    models = {fold: random_model("qwen2") for fold in (False, True)}
    for folded, model in models.items():
        attach(model, INT4, calibration=made, fold=folded)
    here, there = models[saved], models[not saved]
    cache = make_prompt_cache(here)
    mx.eval(here(mx.array(TEXT[100 : 100 + count])[None], cache=cache))
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, cache)
    back = load_prompt_cache(file)
    assert {c.layer_maps.folded for c in back} == {saved}  # as it was saved
    match_fold(there, back)
    assert {c.layer_maps.folded for c in back} == {not saved}
    for caches in (cache, back):  # into the page quantized last, whose exact tokens come back
        trim_prompt_cache(caches, 15)
    assert rms(logits(there, back), logits(here, cache)) < 1e-3
    assert back[0].layer_maps is make_prompt_cache(there)[0].layer_maps
    for model in models.values():
        detach(model)


@pytest.mark.parametrize("saved", (False, True), ids=("unfolded", "folded"))
def test_a_cache_that_mlx_lm_loads_follows_the_only_model_here(made, saved, tmp_path):
    """By `load_prompt_cache` alone: nobody calls `match_fold`."""
    file = str(tmp_path / "cache.safetensors")
    here = random_model("qwen2")
    attach(here, INT4, calibration=made, fold=saved)
    cache = make_prompt_cache(here)
    mx.eval(here(mx.array(TEXT[100:200])[None], cache=cache))
    save_prompt_cache(file, cache)
    expected = logits(here, cache)
    detach(here)
    del here, cache
    gc.collect()
    there = random_model("qwen2")
    attach(there, INT4, calibration=made, fold=not saved)
    back = load_prompt_cache(file)
    assert {c.layer_maps.folded for c in back} == {not saved}
    assert rms(logits(there, back), expected) < 1e-3
    detach(there)


def test_a_session_of_ours_follows_the_model_that_loads_it(tmp_path):
    """Beside models of both kinds, where nothing else tells which of them will read it."""
    plain, folded = (load(TINY, "oscar-int2", fold=fold) for fold in (False, True))
    assert any("values transformed by the weights" in line for line in folded.report())
    for here, there in ((plain, folded), (folded, plain)):
        cache = make_prompt_cache(here.model)
        mx.eval(here.model(mx.array(TEXT[:30])[None], cache=cache))
        path = prompt_cache.save(str(tmp_path / "talk"), Saved(cache, TEXT[:30]), here)
        back = prompt_cache.load(str(path), there).cache
        ours = [c for c in back if isinstance(c, CompressedKVCache)]
        assert {c.layer_maps.folded for c in ours} == {there is folded}
        assert rms(logits(there.model, back, 1, 8), logits(here.model, cache, 1, 8)) < 1e-2


def test_a_cache_of_another_calibration_is_refused(made):
    """The weights hold the maps of one calibration; nothing transforms values from one to the other."""
    model, other = random_model("qwen2"), random_model("qwen2")
    attach(model, INT4, calibration=made, fold=True)
    attach(other, INT4, calibration=measure.calibrate(other, TEXT[88:600]))
    with pytest.raises(UserError, match="weights of this model transform values by"):
        match_fold(model, make_prompt_cache(other))
    for one in (model, other):
        detach(one)


@pytest.mark.parametrize("factory", (None, make_tiles), ids=("ops", "tiles"))
def test_pages_of_values_that_come_rotated(factory):
    """Kernels too: the output is that of the unfolded cache, rotated; and a cache that goes from
    one model to the other reads the same."""
    layer_maps = maps.sample(2, (64, 64))
    x = np.random.default_rng(0).standard_normal((3, 1, 4, 177, 64)).astype(np.float32)
    keys, values = (mx.array(part[:, :2], mx.float16) for part in x[:2])
    q = mx.array(x[2][:, :, :1], mx.float16)
    config = dataclasses.replace(PRESETS["oscar-int4"], **WINDOWS)

    def filled(rotations, values):
        cache = CompressedKVCache(config, rotations)
        cache.update_and_fetch(keys[:, :, :176], values[:, :, :176])
        return cache, cache.update_and_fetch(keys[:, :, 176:], values[:, :, 176:])[0]

    with launch.using(factory):
        plain = attention.attend(q, filled(layer_maps, values)[1], 0.125)
        plain_transformed = layer_maps.values.store(plain.reshape(1, 2, 2, 64)).reshape(plain.shape)
        cache, view = filled(maps.folded(layer_maps), layer_maps.values.apply(values))
        folded = attention.attend(q, view, 0.125)
        assert cache.layer_maps.folded
        # Float16 values transformed before and after rounding: some codes fall the other way.
        assert rms(np.array(folded), np.array(plain_transformed)) < 2e-2
        cache.transform_values(False)
        view, _ = cache.update_and_fetch(keys[:, :, :1], values[:, :, :1])
        back = attention.attend(q, view, 0.125)
        other = filled(layer_maps, values)[0].update_and_fetch(keys[:, :, :1], values[:, :, :1])[0]
        assert not cache.layer_maps.folded
        assert rms(np.array(back), np.array(attention.attend(q, other, 0.125))) < 2e-2


def test_presets_without_calibrated_values_are_refused():
    for kv in ("int4", "oscar-int2/int4"):
        with pytest.raises(UserError, match=rf"\[fold\] .*got {kv}"):
            attach(random_model("llama"), kv, fold=True)
