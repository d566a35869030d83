"""Calibration and evaluation by torch, beside MLX."""

import json
import re
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx_lm.models.cache import make_prompt_cache
from small_models import TINY
from transformers import DynamicCache

import mlxkv
from cuda_track import calibrate, eval
from cuda_track.models import attach_model
from cuda_track.models.loader import load
from cuda_track.models.transformers_compat import cache_of, handed
from experiments.families.building import build
from mlxkv.calibration import measure as mlx_calibrate
from mlxkv.corpora import corpus
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact
from mlxkv.formats.calibration.artifact import SIDES

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def loaded():
    return load(TINY, "fp16", "float32")


@pytest.fixture(scope="module")
def tokens(loaded):
    text = "\n\n".join(corpus.interleaved("calibration")[:12])
    return loaded.tokenizer(text, add_special_tokens=False)["input_ids"][:640]


@pytest.fixture(scope="module")
def made(loaded, tokens):
    """What errors cost is of the likeliest tokens, not of drawn ones: so both tracks have the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", lambda p, n, generator: p.argmax(-1, keepdim=True))
        return calibrate.calibrate(loaded, tokens, "a text", start=[1])


def test_moments_are_those_of_mlx(made, tokens, monkeypatch):
    monkeypatch.setattr(mx.random, "categorical", lambda logits, key: mx.argmax(logits, -1))
    theirs = mlxkv.load(TINY, "fp16", dtype="float32")
    right = mlx_calibrate.calibrate(theirs.model, tokens, text="a text", start=[1])
    assert set(made.layers) == set(right.layers)
    assert made.fingerprint == right.fingerprint
    assert made.text_digest == right.text_digest
    assert made.positions == right.positions > 640
    for name, layer in right.layers.items():
        assert np.allclose(made.layers[name].exchange, layer.exchange, rtol=1e-2)
        mine, other = made.layers[name].keys.queries, layer.keys.queries
        assert np.abs(mine - other).max() < 1e-2 * np.abs(other).max()
        for side in SIDES:
            ours, exact = getattr(made.layers[name], side), getattr(layer, side)
            assert np.allclose(ours.values, exact.values, rtol=1e-3)
            assert np.allclose(ours.balance.sigma, exact.balance.sigma, rtol=1e-2)
            assert np.allclose(ours.peaks, exact.peaks, rtol=1e-3)
            if side == "keys":
                assert np.allclose(ours.mean, exact.mean, atol=1e-3 * np.abs(exact.mean).max())
            # Directions of like eigenvalues may rotate among themselves; what they span may not.
            means = (
                b.vectors * b.values[:, None] @ b.vectors.swapaxes(-1, -2) for b in (ours, exact)
            )
            first, second = means
            assert np.abs(first - second).max() < 1e-4 * np.abs(second).max()


def test_layers_whose_rotation_is_not_seen_are_said(subtests, loaded, tokens, monkeypatch, capsys):
    def one_less(*given):
        return {**rotations(*given), last: None}

    rotations, last = calibrate.rotations, len(loaded.layers) - 1
    for dtype, advice in ("float32", ""), ("bfloat16", "; try --dtype float32"):
        with subtests.test(dtype=dtype):
            monkeypatch.setattr(calibrate, "rotations", one_less)
            made = calibrate.calibrate(load(TINY, "fp16", dtype), tokens, "a text", start=[1])
            assert made.positions == len(tokens)
            count, said = re.match(
                r"\[calibrate\] (\d) of 4 (.*)", capsys.readouterr().err
            ).groups()
            assert said == (
                "layers do not show how keys rotate: the file holds for "
                f"positions up to {made.positions}{advice}"
            )
            assert int(count) == 1


@pytest.mark.parametrize("family", [None, "qwen2", "falcon"])
def test_layers_show_in_16_bits_how_keys_rotate(family):
    """Falcon's attention is its own: nothing of it is observed."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = build(family).eval() if family else load(TINY, "fp16", "float32").model
        for weights in model.parameters():  # frequencies stay float32, as in models that are loaded
            weights.data = weights.to(dtype)
        attach_model.attach(model, "fp16")
        found.append(calibrate.rotations(model, range(32), 32768))
        ropes = [m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")]
        assert ropes and not any(rope._forward_pre_hooks for rope in ropes)
    exact, rounded = found
    assert exact.keys() == rounded.keys() and bool(exact) == (family != "falcon")
    for layer, one in exact.items():
        np.testing.assert_array_equal(rounded[layer].pairs, one.pairs)
        moved, right = (32768 * x.frequencies for x in (rounded[layer], one))
        np.testing.assert_allclose(moved, right, atol=0.05)


def test_rotations_are_sought_by_float32s_numbers_and_by_the_models(monkeypatch):
    asked = []
    monkeypatch.setattr(calibrate.rotary, "measured", lambda rows, *given: asked.append(given))
    calibrate.rotations(load(TINY, "fp16", "bfloat16").model, range(32), 64)
    assert {*asked} == {(2**-23, 2**-7)}


def test_a_file_is_read_by_both(made, loaded, tmp_path):
    path = tmp_path / "made.safetensors"
    artifact.write_calibration(path, made)
    back = artifact.read_calibration(path)
    assert back.digest == made.digest
    reports = attach_model.attach(loaded.model, "balanced-int2", path)
    assert [r.compressed for r in reports] == [False, True] * 4
    with pytest.raises(UserError, match="another model"):
        attach_model.attach(loaded.model, "balanced-int2", replace(made, fingerprint="0" * 16))
    assert mlxkv.load(TINY, "oscar-int2", calibration=path).layers[1].compressed
    attach_model.attach(loaded.model, "fp16")


def test_keys_without_their_mean(made, loaded, tokens):
    """Nothing is quantized: the plain logits; caches of transformers have the mean back; and a mean for each kv
    head."""
    ids = torch.tensor([tokens[:120]])
    with torch.no_grad():
        right = loaded.model(ids, **handed(DynamicCache(config=loaded.model.config)))
        attach_model.attach(loaded.model, "centred-int2", made)
        cache = attach_model.new_cache(loaded.model)
        out = loaded.model(ids, **handed(cache))
    plain, own = cache_of(right).layers[1], cache.layers[1].cache
    assert (out.logits - right.logits).norm() < 1e-4 * right.logits.norm()
    left = own.view().recent[0]
    assert torch.allclose(left + own.layer_maps.mean, plain.keys, atol=1e-4)
    assert (left - plain.keys).abs().max() > 0.1
    back = DynamicCache(cache)
    assert torch.allclose(back.layers[1].keys, plain.keys, atol=1e-4)
    assert torch.equal(back.layers[1].values, plain.values)
    attach_model.attach(loaded.model, "fp16")


def test_bits_by_direction_are_those_of_mlx(made, loaded, tokens):
    ids, errors = torch.tensor([tokens[:300]]), []
    theirs = mlxkv.load(TINY, "fill-2.25", dtype="float32", calibration=made)
    right = [one.config for one in make_prompt_cache(theirs.model) if hasattr(one, "config")]
    with torch.no_grad():
        exact = loaded.model(ids, **handed(DynamicCache(config=loaded.model.config))).logits
        for rate in ("fill-1.5", "fill-6", "fill-2.25"):
            attach_model.attach(loaded.model, rate, made)
            cache = attach_model.new_cache(loaded.model)
            loaded.model(ids[:, :-1], **handed(cache))
            last = loaded.model(ids[:, -1:], **handed(cache)).logits[0, -1]
            errors.append(float((last - exact[0, -1]).norm() / exact[0, -1].norm()))
    own = [layer.cache.config for layer in cache.layers[1::2]]
    assert own == right and all(one.keys.quantizer.widths for one in own)
    assert 0 < errors[1] < min(errors[0], errors[2]) and max(errors) < 0.1
    attach_model.attach(loaded.model, "fp16")


def test_attention_that_is_more_than_softmax_keeps_its_keys(subtests):
    for family, why in [
        ("gpt_oss", "sink logits do not allow"),
        ("gemma2", "capped scores do not"),
    ]:
        with subtests.test(family=family, why=why):
            with pytest.warns(UserWarning, match=f"NOTHING IS COMPRESSED: {why}"):
                attach_model.attach(build(family), "centred-int2")


def test_too_little_text_is_refused(loaded):
    with pytest.raises(UserError, match="too little text"):
        calibrate.calibrate(loaded, [5] * 100)


def test_fewer_bits_lose_more(loaded, tokens):
    found = eval.evaluate(loaded, ["fp16", "int8", "naive-int2"], tokens[:420], 12)
    attach_model.attach(loaded.model, "fp16")
    kl = {name: row["kl_mean"] for name, row in found.items()}
    assert kl["fp16"] == 0
    assert 0 < kl["int8"] < 1e-4 < kl["naive-int2"]
    assert found["fp16"]["bits_per_value"] == 16 and found["int8"]["bits_per_value"] == 8.5
    json.dumps(found)


def test_what_is_measured_of_predictions(loaded, tokens):
    """KL(exact, predicted) in nats, by hand; predictions are of the tokens that follow."""
    exact, predicted = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.25, 0.75]] * 2)
    row = eval.compared(predicted.log(), exact.log(), torch.tensor([0, 1]))
    kl = [0.5 * np.log(2) + 0.5 * np.log(2 / 3), 0.9 * np.log(3.6) + 0.1 * np.log(2 / 15)]
    assert np.isclose(row["kl_mean"], np.mean(kl)) and row["kl_p99"] > 0.9 * max(kl)
    assert np.isclose(row["ppl"], (0.25 * 0.75) ** -0.5) and row["top1"] in (0, 0.5)
    attach_model.attach(loaded.model, "fp16")
    with torch.no_grad():
        right = loaded.model(torch.tensor([tokens[:40]]), use_cache=False).logits[0]
    found = eval.predictions(loaded, tokens[:40], 4)
    assert torch.allclose(found, right[-5:-1].log_softmax(-1), atol=1e-4)
    row = eval.evaluate(loaded, ["fp16"], tokens[:40], 4)["fp16"]
    truth = torch.tensor(tokens[36:40])[:, None]
    assert np.isclose(row["ppl"], float((-found.gather(-1, truth)).mean().exp()), rtol=1e-3)
