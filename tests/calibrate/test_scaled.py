"""Scales per channel behind SRFT (SRFT paper, section 7.1): calibrated, kept, refused, read by kernels."""

import numpy as np
import pytest
from calibration_inputs import TEXT, seen_by

from cuda_track.codec import maps as torch_maps
from mlxkv.calibration import measure, moments
from mlxkv.codec import maps
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact, layers
from mlxkv.formats.config import SCALED, CacheConfig, Side
from mlxkv.formats.presets import PRESETS
from mlxkv.formats.quantizers import Affine
from mlxkv.metal import quantize
from mlxkv.spec import affine as ref

KINDS = (SCALED, SCALED)


def test_peaks_are_the_largest_values_that_caches_would_store(model, monkeypatch):
    monkeypatch.setattr(measure, "CHUNK", 50)
    found = measure.calibrate(model, TEXT, window=350)
    for index, windows in enumerate(seen_by(model, TEXT, 350)):
        layer = found.layers[str(index)]
        behind = [[x[0][:, moments.SINK :] for x in window[1:]] for window in windows]
        pair = [np.concatenate(parts, 1) for parts in zip(*behind, strict=True)]
        for side, x in zip(artifact.SIDES, pair, strict=True):
            spec = np.abs(ref.srft(x)).max(1)
            np.testing.assert_allclose(getattr(layer, side).peaks, spec, rtol=1e-4)
            # One scale for all kv heads of a layer, as in the paper.
            scale = layers.channel_scale(getattr(layer, side).peaks)
            np.testing.assert_allclose(scale, ref.channel_scale(ref.srft(x)), rtol=1e-4)


def test_maps_of_both_tracks_are_the_specs(made):
    layer = made.layers["1"]
    ours, theirs = maps.of(made, KINDS)["1"], torch_maps.of(made, KINDS)["1"]
    for side in artifact.SIDES:
        scale = 1.0 / getattr(layer, side).peaks.astype(np.float64).max(0)
        spec = ref.scaled(*ref.transform("srft", 64), scale)
        mine, other = getattr(ours, side), getattr(theirs, side)
        for name, exact in zip(("down", "up"), spec, strict=True):
            for x in (np.array(getattr(mine, name)), getattr(other, name).numpy()):
                assert x.shape == (64, 64)
                np.testing.assert_allclose(x, exact, rtol=1e-5, atol=1e-6)
        assert quantize.fast_kind(mine, 64) == 4  # butterflies and scales, in one dispatch
    assert maps.cut(ours, 1, 2).keys is ours.keys  # of all kv heads: nothing to cut
    assert maps.find(made.digest, "1", kinds=KINDS) is ours


def test_another_seed_has_no_scales():
    with pytest.raises(UserError, match="seed 0; got 3"):
        Side(Affine(4, 32, True), SCALED, seed=3)


def test_one_scale_for_a_page_is_of_all_kv_heads():
    with pytest.raises(UserError, match="shared is for abs-max codes of group 0"):
        Affine(4, 32, True, shared=True)
    config = PRESETS["srft-int4+tensor"]
    assert CacheConfig.from_dict(config.as_dict()) == config
    x = np.random.default_rng(0).standard_normal((3, 16, 64))
    x[2] *= 50
    codes, scale = ref.tensor_encode(x, 4)
    assert scale == np.float16(np.abs(x).max() / 7)
    assert (
        codes[:2] == 8
    ).mean() > 0.99  # a large head takes the steps of the others: the paper's finding
