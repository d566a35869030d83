"""Keys without their calibrated mean: softmax does not see it, codes gain by it; kept, refused, read by both tracks."""

import copy
import dataclasses
import pickle

import mlx.core as mx
import numpy as np
import pytest
import torch
from calibration_inputs import TEXT, data, logits, means_over, moments_over, rms, seen_by, stored
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from random_models import random_model
from tensors import to_torch

from cuda_track.cache import attention as torch_attention
from cuda_track.cache.compressed import CompressedKVCache as TorchCache
from cuda_track.codec import maps as torch_maps
from mlxkv.cache import attention
from mlxkv.calibration import measure
from mlxkv.codec import maps
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact, layers
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.names import parse_kv
from mlxkv.formats.presets import PRESETS
from mlxkv.formats.quantizers import Affine
from mlxkv.loading.attach import attach, detach
from mlxkv.spec import balanced as spec

pytestmark = pytest.mark.usefixtures("detached")

NAMES = ("centred-int2", "centred-int3", "oscar-int2+centred")
KINDS = ("balanced-centred", "balanced")
WINDOWS = {"sink": 16, "recent": 16, "page": 16}
INT2 = dataclasses.replace(PRESETS["centred-int2"], **WINDOWS)


# -- calibration


def test_the_mean_is_of_keys_that_caches_would_store_over_all_positions(leaning, monkeypatch):
    monkeypatch.setattr(measure, "CHUNK", 50)
    found = measure.calibrate(leaning, TEXT, window=350)
    for index, windows in enumerate(seen_by(leaning, TEXT, 350)):
        exact = means_over(stored(windows)[1])
        mean = found.layers[str(index)].keys.mean
        assert mean.dtype == np.float32
        np.testing.assert_allclose(mean, exact, rtol=1e-4, atol=1e-5)
        assert found.layers[str(index)].values.mean is None


def test_maps_are_made_for_what_is_left_without_the_mean(leaning, leaning_made):
    """From the moments in the file, as good as from the keys themselves; the maps of raw moments are not."""
    for index, windows in enumerate(seen_by(leaning, TEXT, len(TEXT))):
        layer = leaning_made.layers[str(index)]
        down = layers.pairs(leaning_made, KINDS, str(index))[0][0]
        reads = layer.keys.queries.astype(np.float64)
        raw = layer.keys.balance.mixed()[0]
        noise, means = stored(windows)
        noise, means = moments_over(noise, len(TEXT)), means_over(means, len(TEXT))
        for g, mean in enumerate(means):
            left = spec.about_mean(noise[g], mean)
            best = spec.balanced(spec.regular(left), spec.regular(reads[g]))[0]
            least = spec.cost(best, left, reads[g])
            assert spec.cost(down[g], left, reads[g]) < 1.01 * least
            assert spec.cost(raw[g].astype(np.float64), left, reads[g]) > 1.05 * least


def test_maps_are_made_for_the_queries_that_a_calibration_holds(leaning_made):
    keys = leaning_made.layers["0"].keys
    rows = np.random.default_rng(0).standard_normal((2, 40, 64)) * np.geomspace(1, 30, 64)
    reads = rows.swapaxes(1, 2) @ rows
    layer = dataclasses.replace(keys, queries=reads.astype(np.float32))
    down, sigma = layers.directions(layer, True)
    noise = layers.subspace.stored_moment(keys.balance)
    for g, mean in enumerate(keys.mean.astype(np.float64)):
        left = spec.regular(spec.about_mean(noise[g], mean))
        best, exact = spec.balanced(left, spec.regular(reads[g]))
        np.testing.assert_allclose(sigma[g] / sigma[g].sum(), exact / exact.sum(), atol=1e-4)
        assert spec.cost(down[g], left, reads[g]) < 1.01 * spec.cost(best, left, reads[g])
    assert np.abs(layers.directions(keys, True)[1] / sigma - 1).max() > 0.5


def test_both_tracks_have_the_same_maps_and_means(leaning_made):
    for kinds in (KINDS, ("oscar-centred", "oscar")):
        ours, theirs = maps.of(leaning_made, kinds)["1"], torch_maps.of(leaning_made, kinds)["1"]
        mean = leaning_made.layers["1"].keys.mean
        np.testing.assert_array_equal(np.array(ours.key_mean.mean)[:, 0], mean)
        np.testing.assert_array_equal(theirs.mean.numpy()[:, 0], mean)
        for side in artifact.SIDES:
            for part in ("down", "up"):
                mine, other = (getattr(getattr(x, side), part) for x in (ours, theirs))
                np.testing.assert_array_equal(np.array(mine), other.numpy())
        for rank in range(2):
            mine, other = maps.cut(ours, rank, 2), torch_maps.cut(theirs, rank, 2)
            np.testing.assert_array_equal(np.array(mine.key_mean.mean)[:, 0], mean[rank : rank + 1])
            np.testing.assert_array_equal(other.mean.numpy()[:, 0], mean[rank : rank + 1])
    plain = maps.of(leaning_made, ("oscar", "oscar"))["1"]
    assert plain.key_mean is None and maps.of(leaning_made, KINDS)["1"].key_mean is not None
    np.testing.assert_array_equal(np.array(plain.keys.down), np.array(ours.keys.down))
    again = pickle.loads(pickle.dumps(maps.of(leaning_made, KINDS)["1"]))
    assert again is maps.of(leaning_made, KINDS)["1"]


def test_a_clip_belongs_to_its_mean(leaning_made):
    form = INT2.keys.format(64, 16)
    assert form.startswith("balanced-centred int2")
    basis = leaning_made.layers["0"].keys
    other = dataclasses.replace(basis, mean=basis.mean + 1)
    assert basis.is_like(basis, form) and not basis.is_like(other, form)
    assert basis.is_like(other, form.replace("-centred", ""))
    assert not basis.is_like(dataclasses.replace(basis, mean=None), form)


# -- configurations


def test_caches_that_observe_queries_are_refused(subtests):
    for name in ["centred-int2", "oscar-int2+centred"]:
        with subtests.test(name=name):
            with pytest.raises(
                UserError,
                match=r"^\[CacheConfig\] keys without their mean cannot be sel.*preset such as int2",
            ):
                dataclasses.replace(parse_kv(name), keep=0.5)


def test_values_keep_their_mean():
    side = Side(Affine(2, 64), "balanced-centred")
    with pytest.raises(UserError, match="only keys .* choose balanced"):
        CacheConfig(side, side)


def test_every_step_of_the_dial_compresses_models_whose_keys_need_their_mean(subtests):
    for dialled, preset, family in (
        ("fill-2.25", "int2", "gpt_oss"),
        ("fill-3", "int3", "gemma2"),
        ("fill-3", "int3", "deepseek_v3"),
    ):
        with subtests.test(dialled=dialled, family=family):
            model = random_model(family)
            made = measure.calibrate(model, TEXT)
            wanted = attach(model, preset, calibration=made)
            reports = attach(model, dialled, calibration=made, strict=True)
            for report, want in zip(reports, wanted, strict=True):
                assert report.compressed == want.compressed
                assert report.bits_per_value == want.bits_per_value
                assert f"{preset} in place of {dialled}" in report.reason or not report.compressed
            assert any(report.compressed for report in reports)
            detach(model)


def test_models_with_sink_logits_are_left_out(subtests):
    model = random_model("gpt_oss")
    made = measure.calibrate(model, TEXT)
    for name in NAMES:
        with subtests.test(name=name):
            with pytest.warns(
                UserWarning, match="NOTHING IS COMPRESSED: sink logits do not allow keys"
            ):
                reports = attach(model, name, calibration=made)
            assert not any(r.compressed for r in reports)
            detach(model)
            with pytest.raises(UserError, match=r"\[--kv-strict\] layers .* sink logits"):
                attach(model, name, calibration=made, strict=True)
            reports = attach(model, "balanced-int2", calibration=made)
            assert any(r.compressed for r in reports)
            detach(model)


# -- caches


# Two kinds of maps; keys without their mean; widths of each layer.
CONFIGS = (
    CacheConfig(PRESETS["oscar-int2"].keys, PRESETS["balanced-int2"].values, **WINDOWS),
    INT2,
    dataclasses.replace(parse_kv("fill-2.25"), **WINDOWS),
)


def test_saved_prompt_caches_come_back(subtests, leaning, leaning_made, tmp_path, monkeypatch):
    monkeypatch.setattr(artifact.console, "cache_dir", lambda: tmp_path)
    for config in CONFIGS:
        with subtests.test(keys=config.keys.label):
            attach(leaning, config, calibration=leaning_made)
            caches = make_prompt_cache(leaning)
            logits(leaning, caches)
            file = str(tmp_path / "cache.safetensors")
            save_prompt_cache(file, caches)
            want = logits(leaning, [copy.copy(c) for c in caches])
            monkeypatch.setattr(maps, "_at_hand", {})  # another process
            artifact.write_calibration(artifact.kept_path("some"), measure.random(leaning))
            artifact.kept_path("other").unlink(missing_ok=True)
            with pytest.raises(UserError, match="none with digest"):
                load_prompt_cache(file)
            artifact.write_calibration(artifact.kept_path("other"), leaning_made)
            back = load_prompt_cache(file)
            assert [one.config for one in back] == [one.config for one in caches]
            assert (back[0].key_mean is not None) == config.centred
            np.testing.assert_array_equal(logits(leaning, back), want)
            assert rms(want, logits(leaning)) > 0.01  # they read on behind other tokens


def test_the_other_track_reads_on_from_a_state(subtests, leaning, leaning_made):
    for config in CONFIGS[1:]:
        with subtests.test(keys=config.keys.label):
            attach(leaning, config, calibration=leaning_made)
            caches = make_prompt_cache(leaning)
            logits(leaning, caches)
            own = caches[0]
            layer_maps = torch_maps.of(leaning_made, own.config.fitted, ["0"])["0"]
            theirs = TorchCache.from_state(
                to_torch(own.state), lambda *_, layer_maps=layer_maps: layer_maps
            )
            keys, values, q = (data(1, n, 1, 64, seed=i) for i, n in enumerate((2, 2, 4)))
            view, _ = own.update_and_fetch(mx.array(keys), mx.array(values))
            ours = attention.attend(mx.array(q), view, 0.125)
            view = theirs.update_and_fetch(torch.from_numpy(keys), torch.from_numpy(values))
            out = torch_attention.attend(torch.from_numpy(q), view, 0.125)
            assert rms(out.numpy(), ours) < 1e-5
            assert torch.equal(view.recent[0][:, :, -1:], torch.from_numpy(keys) - layer_maps.mean)
