"""Scales per channel behind SRFT (SRFT paper, section 7.1): calibrated, kept, refused, read by kernels."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from on_emulator import make, make_tiles
from random_models import random_model
from safetensors import safe_open
from safetensors.numpy import save

from cuda_track.codec import maps as torch_maps
from mlxkv.cache import selftest
from mlxkv.codec import maps
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact, layers
from mlxkv.formats.config import SCALED, Affine, CacheConfig, Side
from mlxkv.formats.names import parse_kv
from mlxkv.formats.presets import PRESETS
from mlxkv.metal import seal
from mlxkv.models import attach, detach
from mlxkv.models.calibration import measure, moments
from mlxkv.spec import affine as ref

TEXT = np.random.default_rng(0).integers(0, 64, 700).tolist()
KINDS = (SCALED, SCALED)


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@pytest.fixture(scope="module")
def made(model):
    return measure.calibrate(model, TEXT)


def stored_by(model, window):
    """Per layer (keys, values) [G, T, D] of every token behind the first 64 of a window, from plain caches."""
    out = [([], []) for _ in model.layers]
    for start in range(0, len(TEXT), window):
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array(TEXT[start : start + window])[None], cache=cache))
        for layer, pair in zip(cache, out, strict=True):
            for x, parts in zip(layer.state[:2], pair, strict=True):
                parts.append(np.array(x[0, :, moments.SINK :], np.float64))
    return [tuple(np.concatenate(parts, 1) for parts in pair) for pair in out]


def test_peaks_are_the_largest_values_that_caches_would_store(model, monkeypatch):
    monkeypatch.setattr(measure, "CHUNK", 50)
    found = measure.calibrate(model, TEXT, window=350)
    whole = measure.calibrate(model, TEXT, window=350, per_layer=True)
    for index, pair in enumerate(stored_by(model, 350)):
        layer, one = found.layers[str(index)], whole.layers[str(index)]
        for side, x in zip(artifact.SIDES, pair, strict=True):
            spec = np.abs(ref.srft(x)).max(1)
            np.testing.assert_allclose(getattr(layer, side).peaks, spec, rtol=1e-4)
            np.testing.assert_allclose(getattr(one, side).peaks, spec.max(0)[None], rtol=1e-4)
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
        assert seal.fast_kind(mine, 64) == 4  # butterflies and scales, in one dispatch
    assert maps.cut(ours, 1, 2).keys is ours.keys  # of all kv heads: nothing to cut
    assert maps.find(made.digest, "1", kinds=KINDS) is ours


def test_it_comes_back_the_same(made, tmp_path):
    artifact.write(tmp_path / "a.safetensors", made)
    back = artifact.read(tmp_path / "a.safetensors")
    assert back.scaled and back.digest == made.digest
    for name, layer in made.layers.items():
        for side in artifact.SIDES:
            ours, theirs = (getattr(x, side).peaks for x in (layer, back.layers[name]))
            np.testing.assert_array_equal(ours, theirs)


def rewritten(path, header=None, drop=(), **tensors):
    with safe_open(path, "numpy") as file:
        text = file.metadata()["mlxkv"]
        found = {n: file.get_tensor(n) for n in file.keys() if n not in drop}  # noqa: SIM118
    path.write_bytes(save(found | tensors, {"mlxkv": text}))


def test_every_fault_is_one_line(made, tmp_path):
    path = tmp_path / "a.safetensors"
    artifact.write(path, made)
    whole, sound = path.read_bytes(), made.layers["1"].values.peaks
    nan, zero, other = sound.copy(), sound.copy(), sound * np.float32(1.001)
    nan[0, 3], zero[1, 7] = np.nan, 0.0
    for changes, reason in (
        ({"1.values.peaks": nan}, "NaN, infinity .* in layer 1, values"),
        ({"1.values.peaks": zero}, "peaks that are not positive in layer 1, values"),
        ({"1.values.peaks": sound[:, :32].copy()}, "parts missing"),
        ({"1.values.peaks": other}, "its digest differs"),
        ({"drop": ["1.values.peaks"]}, "its digest differs"),
    ):
        path.write_bytes(whole)
        rewritten(path, **changes)
        with pytest.raises(UserError, match=reason) as caught:
            artifact.read(path)
        assert "\n" not in str(caught.value)


def without_peaks(made):
    from dataclasses import replace

    out = {}
    for name, layer in made.layers.items():
        sides = {s: replace(getattr(layer, s), peaks=None) for s in artifact.SIDES}
        out[name] = replace(layer, **sides)
    made = replace(made, layers=out)
    return made


def test_older_files_serve_other_presets(model, made, tmp_path):
    path, old = tmp_path / "old.safetensors", without_peaks(made)
    artifact.write(path, old)
    assert not old.scaled and artifact.read(path).digest == old.digest != made.digest
    attach(model, "balanced-int2", calibration=path)
    with pytest.raises(
        UserError, match=r"\[calibration\] .*old.*no scales per channel.*mlxkv calib"
    ):
        attach(model, "int4/srft-scaled-int4", calibration=path)
    assert make_prompt_cache(model)[0].config.keys.transform == "balanced"  # the model is unchanged
    detach(model)


def test_a_cache_holds_what_the_law_says(subtests, model, made):
    """Keys and values of an attached model, page by page, from a plain cache's by the spec."""
    for name in ("srft-scaled-int4", "srft-scaled-int2", "srft-scaled-int4+g64"):
        with subtests.test(name=name):
            config = parse_kv(name)
            attach(model, config, calibration=made)
            ours = make_prompt_cache(model)
            mx.eval(model(mx.array(TEXT[:512])[None], cache=ours))
            detach(model)
            first = stored_by(model, 700)[0]  # of layer 0: they depend on no cache
            pages = ours[0]._store
            for i, (side, x) in enumerate(zip(artifact.SIDES, first, strict=True)):
                spec = getattr(config, side).quantizer
                scale = 1.0 / getattr(made.layers["0"], side).peaks.astype(np.float64).max(0)
                down, up = ref.scaled(*ref.transform("srft", 64), scale)
                tokens = pages.count * config.page
                assert tokens >= 256
                group = spec.group_size(64, config.page)
                codes, steps, biases = ref.affine_encode(
                    x[:, :tokens] @ down, spec.bits, group, True
                )
                law = ref.affine_decode(codes, steps, biases, group) @ up
                found = np.array(pages.read(0, pages.count).decode(i, mx.float32))[0]
                error = np.sqrt(np.mean((found - law) ** 2) / np.mean(law**2))
                assert error < 2e-2, error  # a code at a rounding boundary moves its whole token


def test_kernels_pass_their_own_test(subtests):
    for factory, name in ((make, "srft-scaled-int4"), (make_tiles, "srft-scaled-int3")):
        with subtests.test(factory=factory, name=name):
            tiled = factory is make_tiles
            found = selftest.test(PRESETS[name], 64, mx.float16, factory, tiled)
            assert found.reason is None and found.errors["seal"] < selftest.SEAL_BOUND / 2, found


def test_another_seed_has_no_scales():
    with pytest.raises(UserError, match="seed 0; got 3"):
        Side(Affine(4, 32, True), SCALED, seed=3)


def test_one_scale_for_a_page_is_of_all_kv_heads():
    with pytest.raises(UserError, match="shared is for abs-max codes of group 0"):
        Affine(4, 32, True, shared=True)
    config = PRESETS["srft-int4+tensor"]
    assert CacheConfig.from_dict(config.as_dict()) == config
    assert (
        "shared" not in PRESETS["srft-int4"].as_dict()["keys"]["quantizer"]
    )  # older versions read it
    x = np.random.default_rng(0).standard_normal((3, 16, 64))
    x[2] *= 50
    codes, scale = ref.tensor_encode(x, 4)
    assert scale == np.float16(np.abs(x).max() / 7)
    assert (
        codes[:2] == 8
    ).mean() > 0.99  # a large head takes the steps of the others: the paper's finding
