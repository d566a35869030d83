"""Value rotations in the weights: the same tokens, the weights back bit by bit, caches that follow."""

from __future__ import annotations

import copy
import dataclasses

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from on_emulator import make, make_tiles
from random_models import random_model

from mlxkv import artifact, attention, calibrate, calibrated
from mlxkv.cache import CompressedKVCache
from mlxkv.chat import Options, run
from mlxkv.cli import main
from mlxkv.config import parse_kv
from mlxkv.errors import UserError
from mlxkv.metal import launch
from mlxkv.models import attach, detach, fold, load, summarise
from mlxkv.models.probe import leaves
from mlxkv.models.seam import folded_bytes
from mlxkv.presets import PRESETS
from mlxkv.session import Session

WINDOWS = {"sink": 16, "recent": 16, "page": 16}  # small ones, so that pages are sealed early
INT4, INT2 = (
    dataclasses.replace(PRESETS[name], **WINDOWS) for name in ("oscar-int4", "oscar-int2")
)
TEXT = np.random.default_rng(0).integers(0, 64, 700).tolist()
GATE = "a gate or a norm comes between"
VALUES = "values are not what a linear map gives out"
TWICE = "its values are read more than once"


def logits(model, cache=None) -> np.ndarray:
    """A prefill of 90 tokens, behind what `cache` holds, and ten decoded ones."""
    cache = cache or make_prompt_cache(model)
    text = mx.array(TEXT[:100])[None]
    parts = [model(text[:, :90], cache=cache)]
    parts += [model(text[:, i : i + 1], cache=cache) for i in range(90, 100)]
    return np.array(mx.concatenate(parts, axis=1)[0])


def rms(x, y) -> float:
    return float(np.sqrt(np.mean((x - y) ** 2) / np.mean(y**2)))


def spoken(model) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(TEXT[:80]), model, max_tokens=12)]


def weights(model) -> dict[str, np.ndarray]:
    return {k: np.array(x.view(mx.uint8)) for k, x in tree_flatten(model.parameters())}


def folds(reports) -> list[str]:
    return [report.fold for report in reports if report.compressed]


@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 1, "num_attention_heads": 6}),
        ("llama", {"num_key_value_heads": 4, "attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"num_key_value_heads": 4, "num_attention_heads": 8}),
        ("gemma3_text", {}),
        ("phi3", {}),
        ("phi", {}),
        ("olmo2", {}),
        ("gpt_oss", {}),
        ("falcon_h1", {}),
    ],
)
def test_folded_weights_say_the_same(family, changes):
    model = random_model(family, **changes)
    made = calibrate.calibrate(model, TEXT[:512])
    before = weights(model)
    attach(model, INT4, calibration=made)
    plain, tokens = logits(model), spoken(model)
    reports = attach(model, INT4, calibration=made, fold=True)
    assert folds(reports) and set(folds(reports)) == {"folded"}
    assert "values turned by the weights" in summarise(reports)[-1]
    changed = {k for k, x in weights(model).items() if not np.array_equal(x, before[k])}
    assert len(changed) >= 2 * len(folds(reports))
    cache = make_prompt_cache(model)
    ours = [c for _, c in leaves(cache) if "Compressed" in type(c).__name__]
    # A code at a rounding boundary may fall the other way.
    assert rms(logits(model, cache), plain) < 1e-3
    assert spoken(model) == tokens
    assert ours and all(c._store.codecs[1].transform is None for c in ours)
    assert all(c._store.codecs[0].transform is c.rotations.keys for c in ours)
    detach(model)
    after = weights(model)
    assert all(np.array_equal(after[k], before[k]) for k in before)


@pytest.mark.parametrize("dtype", (mx.float16, mx.bfloat16))
@pytest.mark.parametrize("family", ("llama", "qwen2", "gemma3_text"))
def test_16_bit_weights(family, dtype):
    model = random_model(family)
    made = calibrate.calibrate(model, TEXT[:512])
    model.set_dtype(dtype)
    before = weights(model)
    reports = attach(model, INT2, calibration=made, fold=True)
    assert set(folds(reports)) == {"folded"}
    assert all(x.dtype == dtype for _, x in tree_flatten(model.parameters()))
    detach(model)
    after = weights(model)
    assert all(np.array_equal(after[k], before[k]) for k in before)


@pytest.mark.parametrize(
    "family, reason",
    [("qwen3_next", GATE), ("gemma3n", VALUES), ("gemma4_text", TWICE), ("iquestloopcoder", TWICE)],
)
def test_what_cannot_be_folded_says_why(family, reason):
    model = random_model(family)
    before = weights(model)
    made = calibrate.calibrate(model, TEXT[:512])
    reports = attach(model, INT4, calibration=made, fold=True)
    assert any(reason in text for text in folds(reports))
    assert "folded" not in folds(reports)
    assert any(f"values turned at run time ({reason}" in line for line in summarise(reports))
    assert all(np.array_equal(x, before[k]) for k, x in weights(model).items())
    detach(model)


def test_quantised_weights_stay_and_others_are_folded():
    model = random_model("llama")
    made = calibrate.calibrate(model, TEXT[:512])
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
    made = calibrate.calibrate(model, TEXT[:512])
    before, right = weights(model), fold._replace

    def wrong(site, turn):
        first = site.target is model.layers[0].self_attn.o_proj
        blocks = site.blocks[::-1] if first else site.blocks
        return right(dataclasses.replace(site, blocks=blocks), turn)

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
    made = calibrate.calibrate(model, TEXT[:512])
    reports = attach(model, INT4, calibration=made, fold=True)
    assert folds(reports) == ["its weights serve other layers too"] * 2
    detach(model)


@pytest.fixture(scope="module")
def model():
    return random_model("qwen2")


@pytest.fixture(scope="module")
def made(model):
    return calibrate.calibrate(model, TEXT[:512])


def test_attaching_again_folds_once(model, made):
    before = weights(model)
    attach(model, INT4, calibration=made, fold=True)
    once, kept = weights(model), folded_bytes(model)
    attach(model, INT2, calibration=made, fold=True)
    assert all(np.array_equal(x, once[k]) for k, x in weights(model).items())
    assert kept == folded_bytes(model) == 2 * 4 * (256 * 128 + 128 + 256 * 256)
    attach(model, "int4")
    assert all(np.array_equal(x, before[k]) for k, x in weights(model).items())
    detach(model)


def test_a_folded_model_is_calibrated_as_it_was(model, made):
    attach(model, INT4, calibration=made, fold=True)
    folded = weights(model)
    again = calibrate.calibrate(model, TEXT[:512])
    assert again.digest == made.digest
    assert all(np.array_equal(x, folded[k]) for k, x in weights(model).items())
    detach(model)


@pytest.mark.parametrize("pair", ("int4/oscar-int2", "oscar-int3/oscar-int2"))
def test_pairs(model, made, pair):
    config = dataclasses.replace(parse_kv(pair), **WINDOWS)
    attach(model, config, calibration=made)
    plain = logits(model)
    assert set(folds(attach(model, config, calibration=made, fold=True))) == {"folded"}
    assert rms(logits(model), plain) < 1e-3
    detach(model)


@pytest.mark.parametrize("count", (20, 100), ids=("live", "pages"))
@pytest.mark.parametrize("saved", (False, True), ids=("unfolded", "folded"))
def test_saved_caches_go_to_models_of_the_other_kind(model, made, saved, count, tmp_path):
    attach(model, INT4, calibration=made, fold=saved)
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array(TEXT[100 : 100 + count])[None], cache=cache))
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, cache)
    here = logits(model, cache)
    attach(model, INT4, calibration=made, fold=not saved)
    back = load_prompt_cache(file)
    assert {c.rotations.folded for c in back} == {saved}  # as it was saved, until it is used
    there = logits(model, back)
    assert {c.rotations.folded for c in back} == {not saved}
    assert rms(there, here) < 1e-3
    same = make_prompt_cache(model)
    assert same[0].rotations is back[0].rotations
    detach(model)


def test_live_caches_follow_the_weights(model, made):
    """Across detach and another preset, too: then nothing is folded."""
    attach(model, INT4, calibration=made, fold=True)
    text = mx.array(TEXT[100:200])[None]
    cache, kept = make_prompt_cache(model), make_prompt_cache(model)
    for one in (cache, kept):
        mx.eval(model(text, cache=one))
    here = logits(model, cache)
    attach(model, "int4")
    assert rms(logits(model, kept), here) < 1e-3
    detach(model)


@pytest.mark.parametrize("factory", (None, make, make_tiles), ids=("ops", "kernels", "tiles"))
def test_pages_of_values_that_come_rotated(factory):
    """Kernels too: the output is that of the unfolded cache, rotated; and a cache that goes from
    one model to the other reads the same."""
    turns = calibrated.sample(2, (64, 64))
    x = np.random.default_rng(0).standard_normal((3, 1, 4, 177, 64)).astype(np.float32)
    keys, values = (mx.array(part[:, :2], mx.float16) for part in x[:2])
    q = mx.array(x[2][:, :, :1], mx.float16)
    config = dataclasses.replace(PRESETS["oscar-int4"], **WINDOWS)

    def filled(rotations, values):
        cache = CompressedKVCache(config, rotations)
        cache.update_and_fetch(keys[:, :, :176], values[:, :, :176])
        return cache, cache.update_and_fetch(keys[:, :, 176:], values[:, :, 176:])[0]

    with launch.using(factory):
        plain = attention.attend(q, filled(turns, values)[1], 0.125)
        plain_turned = turns.values.store(plain.reshape(1, 2, 2, 64)).reshape(plain.shape)
        entry = calibrated.enter([calibrated.folded(turns)])
        cache, view = filled(calibrated.folded(turns), turns.values.turned(values))
        folded = attention.attend(q, view, 0.125)
        assert cache.rotations.folded
        # Float16 values turned before and after rounding: some codes fall the other way.
        assert rms(np.array(folded), np.array(plain_turned)) < 2e-2
        calibrated.leave(entry)
        view, _ = cache.update_and_fetch(keys[:, :, :1], values[:, :, :1])
        back = attention.attend(q, view, 0.125)
        other = filled(turns, values)[0].update_and_fetch(keys[:, :, :1], values[:, :, :1])[0]
        assert not cache.rotations.folded
        assert rms(np.array(back), np.array(attention.attend(q, other, 0.125))) < 2e-2


def test_two_models_side_by_side(model, made, tmp_path):
    """Each with its caches, and one from a file follows the model that was attached last."""
    attach(model, INT4, calibration=made, fold=True)
    other = random_model("qwen2")
    caches = [make_prompt_cache(model)]
    attach(other, INT4, calibration=made)
    caches.append(make_prompt_cache(other))
    ours, theirs = (logits(*pair) for pair in zip((model, other), caches, strict=True))
    assert rms(ours, theirs) < 1e-3
    assert [c[0].rotations.folded for c in caches] == [True, False]
    copies = [copy.copy(one) for one in caches[0]]
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, caches[0])
    back = load_prompt_cache(file)
    ours, theirs = logits(model, copies), logits(other, back)
    assert rms(ours, theirs) < 1e-3
    assert [c[0].rotations.folded for c in (copies, back)] == [True, False]
    detach(model)
    detach(other)


def test_sessions_are_saved_with_one_and_loaded_with_the_other(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(artifact.console, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(calibrate, "TOKENS", 600)
    session = Session(load(str(model_folder), "oscar-int2", fold=True), max_tokens=4)
    assert any("weights before folding" in note for note in session.loaded.notes)
    list(session.ask("a question " * 60))
    path = session.save(str(tmp_path / "talk"))
    tail = "".join(session.ask("go on"))
    detach(session.loaded.model)
    other = Session(load(str(model_folder), "oscar-int2"), max_tokens=4)
    other.load(str(path))
    assert "".join(other.ask("go on")) == tail
    assert not any(cache.rotations.folded for cache in other.cache)
    detach(other.loaded.model)


def test_presets_without_calibrated_values_are_refused(capsys):
    for kv in ("int4", "oscar-int2/int4"):
        assert main(["chat", "--kv", kv, "--fold", "--prompt", "hi"]) == 2
        line = capsys.readouterr().err
        assert line.startswith("[--fold] ") and f"got {kv}" in line and line.count("\n") == 1
    with pytest.raises(UserError, match=r"\[--fold\]"):
        attach(random_model("llama"), "int4", fold=True)


def test_the_command_reports_it(capsys):
    run(Options(kv="oscar-int2", fold=True, prompt="hi", max_tokens=2))
    said = capsys.readouterr().err
    assert (
        "values turned by the weights" in said
        and "kept for detach, the weights before folding: " in said
    )
