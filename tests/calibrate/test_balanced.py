"""Balanced transforms at work: calibration, the file, caches, kernels, folding."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from calibration_inputs import TEXT, at_zero, data, moments_over, rms, seen_by, stored
from methods import config_named
from mlx_lm.models.cache import make_prompt_cache
from on_emulator import make, make_tiles

from mlxkv.cache import attention
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.calibration import clips, measure, moments
from mlxkv.codec import maps
from mlxkv.codec.maps import LayerMaps
from mlxkv.codec.transform import Transform
from mlxkv.formats.presets import PRESETS
from mlxkv.loading.attach import attach, detach
from mlxkv.metal import launch
from mlxkv.spec import affine as ref
from mlxkv.spec import balanced as spec

pytestmark = pytest.mark.usefixtures("trusted")

WINDOWS = {"sink": 16, "recent": 16, "page": 16}
INT2, OSCAR = (
    dataclasses.replace(config_named(name), **WINDOWS)
    for name in ("balanced-int2+g32", "oscar-int2+g32")
)


# --------------------------------------------------------------------------------------------------
# Calibration


def test_streamed_balances_equal_those_of_the_spec(model, monkeypatch):
    """Keys and values without the first 64 of a window, all queries, and W_o of the layer; keys and queries over all
    positions, keys half by the attention that they get."""
    monkeypatch.setattr(measure, "CHUNK", 50)
    found = measure.calibrate(model, TEXT, window=350)
    for index, windows in enumerate(seen_by(model, TEXT, 350)):
        rotated = ((at_zero(q), at_zero(k), v) for q, k, v in windows)
        q, k, v = (np.concatenate(parts, axis=2) for parts in zip(*rotated, strict=True))
        late = np.arange(len(TEXT)) % 350 >= moments.SINK
        heads, dims = q.shape[1], q.shape[3]
        w = np.array(model.layers[index].self_attn.o_proj.weight, np.float64)
        w = w.T.reshape(heads, dims, -1)
        layer = found.layers[str(index)]
        for basis, x, reads in (
            (layer.keys, k, spec.oscar.key_target(q, 2)),
            (layer.values, v, spec.output_moment(w, 2)),
        ):
            noise = spec.oscar.own_target(x[:, :, late])
            if basis is layer.keys:
                noise, reads = moments_over(stored(windows)[0]), moments_over(reads)
            for g in range(2):
                s = spec.balanced(spec.regular(noise[g]), spec.regular(reads[g]))[1]
                ours = basis.balance.sigma[g].astype(np.float64)
                np.testing.assert_allclose(ours / ours.sum(), s / s.sum(), atol=2e-4)
                down = basis.balance.down[g].astype(np.float64)
                best = spec.cost(
                    spec.balanced(spec.regular(noise[g]), spec.regular(reads[g]))[0],
                    noise[g],
                    reads[g],
                )
                assert spec.cost(down, noise[g], reads[g]) == pytest.approx(best, rel=1e-3)
                if basis is layer.values:  # as large as before
                    energy = np.trace(down.T @ noise[g] @ down) / np.trace(noise[g])
                    assert energy == pytest.approx(1, rel=2e-2)


# --------------------------------------------------------------------------------------------------
# Caches


def through(x, transform: Transform, side):
    """[G, T, D] as attention sees pages of it, by the spec."""
    down, up = (np.array(y, np.float64) for y in (transform.down, transform.up))
    bits, size = side.quantizer.bits, ref.group_size(side.quantizer.group, x.shape[-1])
    stored = ref.affine_encode(x @ down, bits, size, clip=side.quantizer.clip)
    return ref.affine_decode(*stored, size) @ up


def test_pages_are_led_back_by_the_inverse(subtests):
    """Plain ops, the portable kernels and the tiles: the spec's output, in decoding and prefill, of balanced pairs and
    of rotations, another one for each kv head. A pair is far from orthogonal, so a transpose in the place of the
    inverse shows."""
    for factory, dims, dtype, config in (
        (None, 64, mx.float32, INT2),
        (make, 48, mx.float16, OSCAR),
        (make_tiles, 96, mx.float16, INT2),
    ):
        layer_maps = maps.sample(2, (dims, dims), config.fitted)  # the same for both sides
        transform = layer_maps.values
        values = Transform(transform.down[..., ::-1], transform.up[..., ::-1, :])
        layer_maps = dataclasses.replace(layer_maps, values=values)
        config = dataclasses.replace(config, recent=32)
        keys, values = (mx.array(data(1, 2, 177, dims, seed=i), dtype) for i in (0, 1))
        q = mx.array(data(1, 6, 1, dims, seed=2), dtype)
        sink, pages = ref.split(176, 16, 32, 16)
        inside, sides = slice(sink, sink + 16 * pages), []
        for x, transform, side in (
            (keys, layer_maps.keys, config.keys),
            (values, layer_maps.values, config.values),
        ):
            x = np.array(x, np.float64)
            x[0, :, inside] = through(x[0, :, inside], transform, side)
            sides.append(x)
        exact = ref.attention(np.array(q, np.float64), *sides, dims**-0.5)
        for new in (1, 9):
            with subtests.test(factory=factory, dims=dims, tokens=new), launch.using(factory):
                cache = CompressedKVCache(config, layer_maps)
                cache.update_and_fetch(keys[:, :, :176], values[:, :, :176])
                view, _ = cache.update_and_fetch(keys[:, :, 176:], values[:, :, 176:])
                out = attention.attend(mx.repeat(q, new, 2), view, dims**-0.5)[:, :, :1]
                assert rms(out, exact) < (2e-2 if dtype == mx.float16 else 1e-2)
        both = layer_maps.keys, layer_maps.values
        if "oscar" in config.fitted:  # of the first kv head
            wrong = LayerMaps(*(Transform(t.down[0], t.up[0]) for t in both))
        else:
            assert rms(transform.up, np.array(transform.down).swapaxes(-1, -2)) > 0.5
            wrong = LayerMaps(*(Transform(t.down, t.down.swapaxes(-1, -2)) for t in both))
        cache = CompressedKVCache(config, wrong)
        cache.update_and_fetch(keys, values)
        assert rms(attention.attend(q, cache.keys_and_values()[0], dims**-0.5), exact) > 0.1


def test_a_clip_belongs_to_its_transform(model, made):
    """The same bits and group: a clip searched for rotations is not taken for a balanced side."""
    oscar, ours = (PRESETS[f"{name}-int2"] for name in ("oscar", "balanced"))
    assert ours.keys.format(64, 64) == "balanced int2 g64" != oscar.keys.format(64, 64)
    found, trials = clips.search(model, made, ours, TEXT, candidates=(0.9, 0.7))
    basis = found.layers["0"].keys
    assert set(basis.clips) == {"balanced int2 g64"} and set(trials) == {"0", "1"}
    both = clips.search(model, found, oscar, TEXT, candidates=(0.9, 0.7))[0]
    assert set(both.layers["0"].keys.clips) == {"balanced int2 g64", "int2 g64"}
    for config, form in ((ours, "balanced int2 g64"), (oscar, "int2 g64")):
        attach(model, config, calibration=both)
        cache = make_prompt_cache(model)[0]
        assert cache.config.keys.quantizer.clip == both.layers["0"].keys.clips[form]
    detach(model)
