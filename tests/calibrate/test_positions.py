"""Moments over positions: the law, a calibration against it, and what files and models say of their reach."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from calibration_inputs import ROTARY, TEXT, YARN
from random_models import random_model, write_model

from mlxkv.calibrate import run
from mlxkv.calibration import measure, moments
from mlxkv.calibration.moments import far_attention, grouped, products, received, rotate
from mlxkv.formats.calibration import artifact, layers, rotary
from mlxkv.formats.calibration.rotary import Rotary
from mlxkv.formats.calibration.sums import Sums
from mlxkv.loading.load import load
from mlxkv.patching.mark import origin_of
from mlxkv.patching.observers import AttentionCall
from mlxkv.spec import balanced
from mlxkv.spec import positions as spec


@pytest.fixture(scope="module")
def model():
    return random_model("llama", attention_bias=True)


def moment(basis):
    """What the eigenvectors of keys were made from: the moment of queries."""
    return layers.subspace.read_moment(basis.values, basis.vectors)


# -- the law


def test_averages_are_the_laws(subtests):
    for longest in (1000, 32768, 40000, 131072):
        with subtests.test(longest=longest):
            rng, one = np.random.default_rng(0), Rotary(*ROTARY)
            x = rng.standard_normal((2, 90, 64)) + 1
            moments, means, spans = x.swapaxes(1, 2) @ x / 90, x.mean(1), rotary.contexts(longest)
            assert spans == spec.contexts(longest)
            law = np.mean([[spec.moment_over(m, s, *ROTARY) for m in moments] for s in spans], 0)
            np.testing.assert_allclose(one.moment_over(moments, spans), law, atol=1e-12)
            law = np.mean([[spec.mean_over(m, s, *ROTARY) for m in means] for s in spans], 0)
            np.testing.assert_allclose(one.mean_over(means, spans), law, atol=1e-12)


def test_rows_turn_as_the_law_says(subtests):
    for pairs in (ROTARY[0], spec.rotary_pairs(32, 8, interleaved=True)):
        with subtests.test(pairs=pairs):
            frequencies = ROTARY[1][: len(pairs)]
            x = np.random.default_rng(0).standard_normal((1, 2, 50, 64))
            t = np.arange(-20, 30)
            law = spec.rotate(x, t, pairs, frequencies)
            one = Rotary(pairs, frequencies)
            np.testing.assert_allclose(one.rotate(x, t), law, atol=1e-12)
            np.testing.assert_allclose(rotate(mx.array(x), one, t), law, atol=1e-5)
            assert rotate(mx.array(x), None, t).shape == x.shape


def test_sums_lose_nothing_to_a_large_mean():
    """Of keys with a bias 500 times what varies the covariance keeps five digits."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((1, 1, 4000, 32)) + 500 * rng.standard_normal(32)).astype(np.float32)
    sums = None
    for part in np.split(x, 8, 2):
        rows = grouped(mx.array(part), 1)
        sums = sums or Sums(np.array(rows.mean(1)))
        sums.add(*map(np.array, products(rows, mx.array(sums.centre))), rows.shape[1])
    exact = x[0].astype(np.float64)
    np.testing.assert_allclose(sums.mean(), exact.mean(1), rtol=1e-9)
    mean = sums.mean()[0]
    left = sums.moment()[0] - np.outer(mean, mean)
    np.testing.assert_allclose(left, np.cov(exact[0].T, bias=True), atol=1e-5)


def test_attention_that_keys_get_is_the_laws(subtests):
    """In chunks of any size, with masks of any kind; sink logits and caps lower it."""
    for mask in ("causal", "boolean", "additive"):
        with subtests.test(mask=mask):
            rng = np.random.default_rng(0)
            q, k = rng.standard_normal((1, 4, 300, 64)), rng.standard_normal((1, 2, 300, 64))
            law = balanced.received(q[0], k[0], 0.3, 16)
            found = np.zeros((2, 300))
            for start, stop in ((0, 130), (130, 137), (137, 300)):
                seen = mx.arange(stop)[None] <= mx.arange(start, stop)[:, None]
                masks = {"boolean": seen, "additive": mx.where(seen, 0.0, -1e9)}
                call = AttentionCall(
                    (mx.array(k[:, :, :stop]), None),
                    mx.array(q[:, :, start:stop]),
                    0.3,
                    masks.get(mask, mask),
                    None,
                    None,
                )
                asked = far_attention(call, 16)
                assert (asked is None) == (stop < 145)
                if asked is not None:
                    found[:, :stop] += (more := received(asked[1], 2))
            np.testing.assert_allclose(found[:, 16:], law[:, 16:], rtol=1e-4)
            for change in ({"sinks": mx.ones(4) * 3}, {"softcap": 0.1}):
                other = received(far_attention(replace(call, **change), 16)[1], 2)
                assert not np.allclose(other, more, rtol=1e-2)


# -- calibrations


KINDS = (
    ("llama", {"rope_traditional": True}),
    ("llama", {"rope_scaling": YARN}),
    ("deepseek_v2", {}),
)


def test_position_0_is_before_rope(subtests, monkeypatch):
    """The first layer of a model sees the same without RoPE, but for what attention reads."""
    for family, changes in KINDS:
        with subtests.test(family=family, changes=changes):
            with monkeypatch.context() as patch:
                patch.setattr(moments, "far_attention", lambda *args: None)
                model = random_model(family, **changes)
                first = measure.calibrate(model, TEXT[:512], positions=1).layers["0"]
                patch.setattr(mx.fast, "rope", lambda x, *args, **more: x)
                plain = measure.calibrate(model, TEXT[:512], positions=4096).layers["0"]
                ours, law = moment(first.keys), moment(plain.keys)
                np.testing.assert_allclose(ours, law, atol=2e-4 * np.abs(law).max())
                law = plain.keys.mean
                np.testing.assert_allclose(first.keys.mean, law, atol=2e-4 * np.abs(law).max())


def test_layers_that_do_not_turn_as_rope_does_hold_for_their_windows(model, monkeypatch):
    monkeypatch.setattr(measure, "rotations", lambda model, places, *_: dict.fromkeys(places))
    made = measure.calibrate(model, TEXT, window=350)
    assert made.positions == 350
    assert measure.random(model).positions == 32768


# -- files and models


def test_files_say_their_reach(model, tmp_path):
    path = tmp_path / "a.safetensors"
    made = measure.calibrate(model, TEXT, positions=5000)
    artifact.write_calibration(path, made)
    assert artifact.read_calibration(path).positions == 5000
    assert artifact.read_calibration(path).shortfall(5000) is None
    said = artifact.read_calibration(path).shortfall(5001)
    assert said.endswith("up to 5,000; longer contexts lose quality")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(artifact.console, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(measure, "TOKENS", 600)
    monkeypatch.setattr(artifact.console, "_warned", set())
    return write_model(tmp_path / "model", max_position_embeddings=6000)


def test_a_file_of_fewer_positions_warns_once(folder, tmp_path, capsys):
    path = tmp_path / "a.safetensors"
    loaded = load(str(folder), "fp16")
    made = measure.from_corpus(loaded.model, origin_of(loaded.model))
    artifact.write_calibration(path, replace(made, positions=2967))
    capsys.readouterr()
    for kv in ("fill-3", "balanced-int2"):
        load(str(folder), kv, calibration=path)
    said = capsys.readouterr().err
    assert said.count("holds for positions up to 2,967") == 1, said


def test_the_command_says_how_far_its_file_reaches(folder, tmp_path, monkeypatch, capsys):
    options = run.CalibrateOptions(
        model=str(folder), tokens=600, out=str(tmp_path / "a.safetensors")
    )
    run.run_calibrate(options)
    assert "holds for positions" not in capsys.readouterr().err
    monkeypatch.setattr(measure, "rotations", lambda model, places, *_: dict.fromkeys(places))
    for dtype, advice in (("float32", ""), ("float16", "; --dtype float32 may reach further")):
        monkeypatch.setattr(artifact.console, "_warned", set())
        run.run_calibrate(replace(options, dtype=dtype))
        said = " ".join(capsys.readouterr().err.split())
        reach = f"a.safetensors holds for positions up to 600; longer contexts lose quality{advice}"
        assert said.endswith(reach), said


def test_the_users_own_holds_for_the_models_context(folder, capsys):
    load(str(folder), "fill-3")
    (kept,) = artifact.folder().iterdir()
    assert artifact.read_calibration(kept).positions == 6000
    assert "holds for positions" not in capsys.readouterr().err
