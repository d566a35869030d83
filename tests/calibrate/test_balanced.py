"""Balanced transforms at work: calibration, the file, caches, kernels, folding."""

import copy
import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from older_file import older
from on_emulator import make, make_tiles
from random_models import random_model
from turning import at_zero, moments_over, seen_by, stored

from mlxkv.cache import attention
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.codec import maps
from mlxkv.codec.maps import LayerMaps
from mlxkv.codec.transform import Transform
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact
from mlxkv.formats.config import BALANCED, Affine, CacheConfig
from mlxkv.formats.names import parse_kv
from mlxkv.formats.presets import PRESETS
from mlxkv.metal import launch
from mlxkv.models import attach, detach
from mlxkv.models.calibration import clips, measure, moments
from mlxkv.spec import affine as ref
from mlxkv.spec import balanced as spec

WINDOWS = {"sink": 16, "recent": 16, "page": 16}
INT2 = dataclasses.replace(parse_kv("balanced-int2+g32"), **WINDOWS)
INT4 = dataclasses.replace(PRESETS["balanced-int4"], **WINDOWS)
TEXT = np.random.default_rng(0).integers(0, 64, 700).tolist()
KINDS = (BALANCED, BALANCED)


def data(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rms(x, exact):
    return np.sqrt(np.mean((np.array(x) - exact) ** 2) / np.mean(np.array(exact) ** 2))


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@pytest.fixture(scope="module")
def made(model):
    return measure.calibrate(model, TEXT)


def logits(model, cache=None):
    cache = cache or make_prompt_cache(model)
    text = mx.array(TEXT[:100])[None]
    parts = [model(text[:, :90], cache=cache)]
    parts += [model(text[:, i : i + 1], cache=cache) for i in range(90, 100)]
    return np.array(mx.concatenate(parts, axis=1)[0])


# --------------------------------------------------------------------------------------------------
# Calibration


def test_streamed_balances_equal_those_of_the_spec(model, monkeypatch):
    """Keys and values without the first 64 of a window, all queries, and W_o of the layer; keys and queries over all
    positions, keys half by the attention that they get."""
    monkeypatch.setattr(measure, "CHUNK", 50)
    found = measure.calibrate(model, TEXT, window=350)
    for index, windows in enumerate(seen_by(model, TEXT, 350)):
        turned = ((at_zero(q), at_zero(k), v) for q, k, v in windows)
        q, k, v = (np.concatenate(parts, axis=2) for parts in zip(*turned, strict=True))
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


def test_families(subtests):
    """Gates and norms before the output projection too: then errors of values count alike."""
    for family in ("gemma3_text", "qwen3_next", "gpt_oss"):
        with subtests.test(family=family):
            check_families(family)


def check_families(family):
    model = random_model(family)
    made = measure.calibrate(model, TEXT[:512], positions=512)
    assert made.balanced

    def last(config):
        attach(model, dataclasses.replace(config, **WINDOWS), calibration=made)
        out = logits(model)
        detach(model)
        return out

    plain = logits(model)
    error = rms(last(PRESETS["balanced-int4"]), plain)
    assert 0 < error < 1.5 * rms(last(PRESETS["oscar-int4"]), plain)


def test_one_pair_per_layer_and_none_for_other_targets(model):
    shared = measure.calibrate(model, TEXT, per_layer=True).layers["0"]
    assert shared.keys.balance.down.shape == (1, 64, 64)
    assert not measure.calibrate(model, TEXT, target="tensor").balanced
    assert measure.calibrate(model, target="random").balanced  # for benches


# --------------------------------------------------------------------------------------------------
# Caches


def through(x, turn: Transform, side):
    """[G, T, D] as attention sees pages of it, by the spec."""
    down, up = (np.array(y, np.float64) for y in (turn.down, turn.up))
    bits, size = side.quantizer.bits, ref.group_size(side.quantizer.group, x.shape[-1])
    stored = ref.affine_encode(x @ down, bits, size, clip=side.quantizer.clip)
    return ref.affine_decode(*stored, size) @ up


def test_pages_are_led_back_by_the_inverse(subtests):
    """Plain ops, the portable kernels and the tiles: the spec's output, in decoding and prefill. The
    pair is far from orthogonal, so a transpose in the place of the inverse shows."""
    for factory, dims, dtype in (
        (None, 64, mx.float32),
        (make, 80, mx.float16),
        (make_tiles, 96, mx.float16),
    ):
        for tokens in (1, 9):
            with subtests.test(factory=factory, dims=dims, dtype=dtype, tokens=tokens):
                turns = maps.sample(2, (dims, dims), KINDS)  # the same for both sides
                turn = turns.values
                values = Transform(turn.down[..., ::-1], turn.up[..., ::-1, :])
                turns = dataclasses.replace(turns, values=values)
                assert rms(turns.keys.up, np.array(turns.keys.down).swapaxes(-1, -2)) > 0.5
                config = dataclasses.replace(INT2, recent=32)
                keys, values = data(1, 2, 177, dims), data(1, 2, 177, dims, seed=1)
                with launch.using(factory):
                    cache = CompressedKVCache(config, turns)
                    cache.update_and_fetch(
                        *(mx.array(x[:, :, :176], dtype) for x in (keys, values))
                    )
                    view, _ = cache.update_and_fetch(
                        *(mx.array(x[:, :, 176:], dtype) for x in (keys, values))
                    )
                    q = mx.array(data(1, 6, 1, dims, seed=2), dtype)
                    out = attention.attend(mx.repeat(q, tokens, 2), view, dims**-0.5)[:, :, :1]
                    mx.eval(out)
                sink, pages = ref.split(176, 16, 32, 16)
                inside, sides = slice(sink, sink + 16 * pages), []
                for x, turn, side in (
                    (keys, turns.keys, config.keys),
                    (values, turns.values, config.values),
                ):
                    x = np.array(mx.array(x, dtype), np.float64)
                    x[0, :, inside] = through(x[0, :, inside], turn, side)
                    sides.append(x)
                exact = ref.attention(np.array(q, np.float64), *sides, dims**-0.5)
                assert rms(out, exact) < (2e-2 if dtype == mx.float16 else 1e-2)
                both = turns.keys, turns.values
                wrong = LayerMaps(*(Transform(t.down, t.down.swapaxes(-1, -2)) for t in both))
                cache = CompressedKVCache(config, wrong)
                cache.update_and_fetch(mx.array(keys, dtype), mx.array(values, dtype))
                assert rms(attention.attend(q, cache.keys_and_values()[0], dims**-0.5), exact) > 0.1


def test_saved_prompt_caches_come_back(model, made, tmp_path, monkeypatch):
    """Sides of both kinds, in another process too, and never those of the other kind."""
    keys, values = PRESETS["oscar-int2"].keys, PRESETS["balanced-int2"].values
    config = CacheConfig(keys, values, **WINDOWS)
    attach(model, config, calibration=made)
    caches = make_prompt_cache(model)
    logits(model, caches)
    turns = caches[0].layer_maps
    assert turns.kinds == ("oscar", BALANCED) == config.fitted
    basis = made.layers["0"]
    np.testing.assert_array_equal(np.array(turns.keys.down), basis.keys.rotation("uhp"))
    np.testing.assert_array_equal(np.array(turns.values.down), basis.values.balance.pair("uhp")[0])
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, caches)
    want = logits(model, [copy.copy(c) for c in caches])
    monkeypatch.setattr(maps, "_at_hand", {})  # another process
    monkeypatch.setattr(artifact.console, "cache_dir", lambda: tmp_path)
    with pytest.raises(UserError, match="none with digest"):
        load_prompt_cache(file)
    artifact.write(artifact.kept_path("some"), made)
    back = load_prompt_cache(file)
    assert back[0].layer_maps.kinds == config.fitted
    np.testing.assert_array_equal(logits(model, back), want)
    detach(model)


def test_folded_weights_say_the_same(subtests):
    for family, changes in [
        ("llama", {"num_key_value_heads": 4, "attention_bias": True}),
        ("phi3", {}),
    ]:
        with subtests.test(family=family, changes=changes):
            model = random_model(family, **changes)
            made = measure.calibrate(model, TEXT[:512])
            attach(model, INT4, calibration=made)
            plain = logits(model)
            reports = attach(model, INT4, calibration=made, fold=True)
            assert {r.fold for r in reports if r.compressed} == {"folded"}
            cache = make_prompt_cache(model)
            assert rms(logits(model, cache), plain) < 1e-3
            copies = [copy.copy(one) for one in cache]
            assert rms(logits(model, copies), logits(model, cache)) < 1e-6
            assert copies[0].layer_maps.folded
            detach(model)


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


def test_clips_are_kept_where_the_transform_is_the_same(made):
    marked = {"balanced int2 g64": 0.9, "int2 g64": 0.8}
    layer = made.layers["0"]
    clipped = dataclasses.replace(
        made,
        layers={
            **made.layers,
            "0": dataclasses.replace(layer, keys=dataclasses.replace(layer.keys, clips=marked)),
        },
    )
    again, lost = made.with_clips_of(clipped)
    assert again.layers["0"].keys.clips == marked and lost == 0
    again, lost = older(made).with_clips_of(clipped)
    assert again.layers["0"].keys.clips == {"int2 g64": 0.8} and lost == 1


def test_presets():
    for group, name in ((128, ""), (64, "+g64"), (32, "+g32")):
        config = parse_kv(f"balanced-int2{name}")
        assert config.keys.quantizer == Affine(2, group, clip=config.keys.quantizer.clip)
        assert (config.sink, config.recent, config.balanced) == (64, 64, True)
    assert not PRESETS["oscar-int2"].balanced and PRESETS["oscar-int2"].calibrated
