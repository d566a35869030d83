"""Calibrated caches: the spec's numbers, every way of saving and branching, every family."""

import copy
import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)
from on_emulator import make, make_tiles
from random_models import random_model

from mlxkv.cache import attention
from mlxkv.cache.adaptive import AdaptiveKVCache
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.view import OPS, PORTABLE, TILES
from mlxkv.codec import maps
from mlxkv.codec.maps import LayerMaps
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact
from mlxkv.formats.names import parse_kv
from mlxkv.formats.presets import PRESETS
from mlxkv.metal import launch
from mlxkv.models import attach, detach, load
from mlxkv.models.calibration import measure
from mlxkv.models.taking_back import cut_back
from mlxkv.spec import affine as ref

OSCAR = dataclasses.replace(parse_kv("oscar-int2+g32"), sink=16, recent=16, page=16)
TEXT = np.random.default_rng(0).integers(0, 64, 700).tolist()


def data(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rms(x, spec):
    return np.sqrt(np.mean((np.array(x) - spec) ** 2) / np.mean(np.array(spec) ** 2))


def through(x, down, config, side):
    """[G, T, D] as attention sees pages of it, by the spec, each kv head with its own rotation."""
    bits, group = side.quantizer.bits, side.quantizer.group
    out = []
    for head, turn in zip(x, np.array(down, np.float64), strict=True):
        size, clip = ref.group_size(group, x.shape[-1]), side.quantizer.clip
        stored = ref.affine_encode(head @ turn, bits, size, clip=clip)
        out.append(ref.affine_decode(*stored, size) @ turn.T)
    return np.stack(out)


def test_each_kv_head_has_its_own_rotation(subtests):
    """Decode over pages: plain ops, the portable kernels and the tiles all give the spec's output."""
    for factory in (None, make, make_tiles):
        for dims, dtype in [(64, mx.float32), (80, mx.float16), (96, mx.float16)]:
            with subtests.test(factory=factory, dims=dims, dtype=dtype):
                turns = maps.sample(2, (dims, dims))
                config = dataclasses.replace(OSCAR, recent=32)
                keys, values = data(1, 2, 177, dims), data(1, 2, 177, dims, seed=1)
                keys[0, 1] *= 3
                with launch.using(factory):
                    cache = CompressedKVCache(config, turns)
                    cache.update_and_fetch(
                        mx.array(keys[:, :, :176], dtype), mx.array(values[:, :, :176], dtype)
                    )
                    view, _ = cache.update_and_fetch(
                        mx.array(keys[:, :, 176:], dtype), mx.array(values[:, :, 176:], dtype)
                    )
                    q = mx.array(data(1, 6, 1, dims, seed=2), dtype)
                    out = attention.attend(q, view, dims**-0.5)
                    prefill = attention.attend(mx.repeat(q, 9, 2), view, dims**-0.5)[:, :, :1]
                    mx.eval(out, prefill)
                    body = {make: PORTABLE, make_tiles: TILES if dtype == mx.float16 else PORTABLE}
                    assert view.pages.plan.body == body.get(factory, OPS)
                sink, pages = ref.split(176, 16, 32, 16)
                inside = slice(sink, sink + 16 * pages)
                sides = []
                for x, turn, side in (
                    (keys, turns.keys, config.keys),
                    (values, turns.values, config.values),
                ):
                    x = np.array(mx.array(x, dtype), np.float64)
                    x[0, :, inside] = through(x[0, :, inside], turn.down, config, side)
                    sides.append(x)
                spec = ref.attention(np.array(q, np.float64), *sides, dims**-0.5)
                bound = (
                    2e-2 if dtype == mx.float16 else 1e-2
                )  # a code at a boundary may fall the other way
                assert rms(out, spec) < bound
                assert rms(prefill, spec) < bound
                shared = LayerMaps(*(turn_of(t, 0) for t in (turns.keys, turns.values)))
                wrong = CompressedKVCache(config, shared)
                wrong.update_and_fetch(mx.array(keys, dtype), mx.array(values, dtype))
                assert (
                    rms(attention.attend(q, wrong.keys_and_values()[0], dims**-0.5), spec) > bound
                )


def turn_of(transform, head):
    return type(transform)(transform.down[head], transform.up[head])


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@pytest.fixture(scope="module")
def made(model):
    return measure.calibrate(model, TEXT[:512])


@pytest.fixture
def caches(model, made):
    attach(model, OSCAR, calibration=made)
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array(TEXT[:100])[None], cache=cache))
    yield cache
    detach(model)


def next_logits(model, cache):
    return np.array(model(mx.array(TEXT[100:103])[None], cache=cache))


@pytest.mark.parametrize("branch", (copy.deepcopy, copy.copy))
def test_branches_go_their_own_way(model, caches, branch):
    other = [branch(one) for one in caches]
    mx.eval(model(mx.array(TEXT[200:240])[None], cache=other))
    assert other[0].layer_maps is caches[0].layer_maps
    assert (other[0].offset, caches[0].offset) == (140, 100)
    fresh = make_prompt_cache(model)
    mx.eval(model(mx.array(TEXT[:100])[None], cache=fresh))
    np.testing.assert_array_equal(next_logits(model, caches), next_logits(model, fresh))


def test_saved_prompt_caches_come_back(model, made, caches, tmp_path):
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, caches)
    back = load_prompt_cache(file)
    assert [c.layer_maps.digest for c in back] == [made.digest] * 2
    assert [c.layer_maps.layer for c in back] == ["0", "1"]
    np.testing.assert_array_equal(next_logits(model, back), next_logits(model, caches))


def test_cutting_back_into_a_page(model, caches):
    before = [np.array(attention._whole(c.keys_and_values()[0], mx.float32)[0]) for c in caches]
    held = caches[0].offset
    assert cut_back(caches, held, kept := held - 60)
    assert {cache.offset for cache in caches} == {kept}
    for cache, keys in zip(caches, before, strict=True):
        after = np.array(attention._whole(cache.keys_and_values()[0], mx.float32)[0])
        np.testing.assert_allclose(after, keys[:, :, :kept], atol=1e-5)


def test_a_state_is_read_with_its_own_rotations_only(made, caches, tmp_path, monkeypatch):
    monkeypatch.setattr(artifact.console, "cache_dir", lambda: tmp_path)
    state = caches[0].state
    monkeypatch.setattr(maps, "_at_hand", {})  # another process
    with pytest.raises(
        UserError, match=f"none with digest {made.digest}; load its model .*--calibration"
    ) as caught:
        CompressedKVCache.from_state(state)
    assert "\n" not in str(caught.value)
    artifact.write(artifact.kept_path("some"), made)
    back = CompressedKVCache.from_state(state)
    np.testing.assert_array_equal(
        np.array(back.layer_maps.keys.down), np.array(caches[0].layer_maps.keys.down)
    )


def test_kv_heads_that_were_spread_over_processes(subtests):
    """`model.shard` leaves each process its own heads, and the maps of all."""
    for preset in ["oscar-int4", "int2", "oja-0.75"]:
        with subtests.test(preset=preset):
            config = PRESETS[preset]
            listens = AdaptiveKVCache if config.listens else CompressedKVCache
            cache = listens(config, maps.sample(2, (64, 64), config.fitted))
            for new in (1, 300):
                with pytest.raises(UserError, match=r"\[attach\] .* 2 kv heads; got 1"):
                    cache.update_and_fetch(*[mx.zeros((1, 1, new, 64))] * 2)
            cache.update_and_fetch(*[mx.zeros((1, 2, 300, 64))] * 2)


def test_a_calibrated_preset_needs_a_calibration(model, made, tmp_path):
    with pytest.raises(UserError, match=r"\[attach\] oscar-int2 needs a calibration; got a model"):
        attach(model, "oscar-int2")
    with pytest.raises(UserError, match="needs the rotations of a calibration"):
        CompressedKVCache(OSCAR)
    assert not hasattr(model, "_mlxkv_attachment")
    path = tmp_path / "a.safetensors"
    artifact.write(path, made)
    for kv in ("oscar-int2", "oscar-int3/int4", "int4/oscar-int2"):
        assert all(report.compressed for report in attach(model, kv, calibration=path))
    with pytest.raises(UserError, match="another shape in layer 0; got 2 kv heads of 64"):
        attach(random_model("llama", num_key_value_heads=1), "oscar-int2", calibration=path)
    cache = make_prompt_cache(model)[0]  # what was attached before stays
    assert cache.config.values.calibrated and not cache.config.keys.calibrated
    detach(model)


def test_a_pair_turns_one_side(model, made):
    attach(model, dataclasses.replace(OSCAR, values=PRESETS["int8"].values), calibration=made)
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array(TEXT[:100])[None], cache=cache))
    codecs = cache[0]._store.codecs
    assert codecs[0].transform is cache[0].layer_maps.keys and codecs[1].transform is None
    detach(model)


def test_on_the_spot_once(model_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(artifact.console, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(measure, "TOKENS", 600)
    loaded = load(str(model_folder), "oscar-int2")
    said = capsys.readouterr().err
    assert "no calibration of" in said and "calibrated on 600 tokens, kept in" in said
    path = artifact.kept_path(loaded.fingerprint)
    assert artifact.read(path).text == "corpus calibration"
    before = path.stat().st_mtime_ns
    load(str(model_folder), "oscar-int3")
    assert capsys.readouterr().err == ""
    assert path.stat().st_mtime_ns == before


def test_load_refuses_the_calibration_of_another_model(model_folder, made, tmp_path):
    path = tmp_path / "a.safetensors"
    artifact.write(path, dataclasses.replace(made, fingerprint="0" * 16))
    with pytest.raises(UserError, match=r"\[calibration\] .* belongs to another model"):
        load(str(model_folder), "oscar-int2", calibration=path)
    with pytest.raises(UserError, match="is not there"):
        load(str(model_folder), "oscar-int2", calibration=tmp_path / "b")


class _Group:
    """As mx.distributed has it."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = lambda: rank, lambda: size


def test_maps_are_cut_to_the_heads_of_a_process():
    model = random_model("qwen3")
    made = measure.calibrate(model, target="random")
    whole = next(iter(maps.of(made).values()))
    heads = whole.keys.down.shape[0]
    parts = [maps.cut(whole, rank, heads) for rank in range(heads)]
    assert all(part.keys.down.shape[0] == part.values.up.shape[0] == 1 for part in parts)
    joined = mx.concatenate([part.keys.down for part in parts])
    assert mx.array_equal(joined, whole.keys.down)
    # A cache that one process has saved is not for another, nor for the whole model.
    assert len({whole.digest, *(part.digest for part in parts)}) == 1 + heads
    assert maps.cut(whole, 0, heads) is parts[0]
    with pytest.raises(UserError, match="cannot be shared by 5 processes"):
        attach(model, "oscar-int2", calibration=made, group=_Group(0, 5))
    with pytest.raises(UserError, match="--fold"):
        attach(model, "oscar-int2", calibration=made, fold=True, group=_Group(0, 2))
    assert "make_cache" not in vars(model)  # nothing was attached
