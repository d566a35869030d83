"""What both implementations store, byte for byte: page records, headers, states of caches."""

from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
import torch
from methods import config_named
from mlx_lm.models.cache import RotatingKVCache
from tensors import to_mlx, to_torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from cuda_track.cache.attention import attend
from cuda_track.cache.compressed import CompressedKVCache
from cuda_track.codec import maps
from cuda_track.codec.codec import Codec
from cuda_track.codec.records import as_codes
from cuda_track.models import prompt_cache
from cuda_track.models.prompt_cache import _maps
from mlxkv.cache.attention import attend as mlx_attend
from mlxkv.cache.compressed import CompressedKVCache as MlxCache
from mlxkv.codec import records as mlx_records
from mlxkv.codec.codec import Codec as MlxCodec
from mlxkv.codec.maps import folded, sample
from mlxkv.errors import UserError
from mlxkv.formats.config import Side
from mlxkv.formats.presets import PRESETS
from mlxkv.formats.quantizers import Half, MixedBits
from mlxkv.formats.records import NAMES

CPU = torch.device("cpu")
IN_RECORDS = [
    *("int8", "int4", "srft-int3", "srft-int4", "hadamard-int2+clip.92", "kivi-int2"),
    *("turbo-int3", "polar", "polar-tree", "polar-tree+online"),
]
STATES = [*IN_RECORDS, "turbo-int2", "fp16/int4"]


def record_sides():
    """(sides of keys and values, dims, tokens of a page): presets, mixed bits, float16 numbers."""
    for preset in IN_RECORDS:
        config = config_named(preset)
        yield from (((config.keys, config.values), dims, config.page) for dims in (64, 128))
    for spec in (MixedBits(2.0, (8, 3, 1)), MixedBits(2.0, (3, 3, 2, 1, 1)), Half()):
        yield (Side(spec),) * 2, getattr(spec, "dims", 96), 64


def test_page_records_of_the_other_side_are_read(subtests):
    for sides, dims, page in record_sides():
        with subtests.test(keys=sides[0].label, dims=dims):
            x = mx.array(
                np.random.default_rng(0).standard_normal((1, 2, 2 * page, dims), np.float32)
            )
            theirs = [MlxCodec(side, dims, page) for side in sides]
            state = {name: code.encode(x) for name, code in zip(NAMES, theirs, strict=True)}
            right = mlx_records.to_records(state, theirs)
            codecs = [Codec(side, dims, page) for side in sides]
            back = as_codes(to_torch(right), codecs)
            for name, side in state.items():
                assert all(torch.equal(back[name][n], to_torch(x)) for n, x in side.items())


def test_windows_are_kept_as_rings_of_the_other_side(subtests):
    window, x = 8, torch.arange(12.0).view(1, 1, 12, 1)
    for tokens in (window - 1, window, window + 1, 12):
        with subtests.test(tokens=tokens):
            layer, back = (DynamicSlidingWindowLayer(sliding_window=window) for _ in range(2))
            theirs = RotatingKVCache(max_size=window)
            for token in x[:, :, :tokens].split(1, 2):
                layer.update(token, token)
                theirs.update_and_fetch(to_mlx(token), to_mlx(token))
            state = prompt_cache._state_of(layer)
            assert state["0"].shape[2] == state["1"].shape[2] == min(tokens, window)
            assert (state["2"], state["4"]) == (tokens, window)
            back.update(x[:, :, :1], x[:, :, :1])
            prompt_cache._fill(back, state)
            assert torch.equal(back.keys, layer.keys) and back.get_seq_length() == tokens
            ring = {"0": to_torch(theirs.keys), "1": to_torch(theirs.values), "5": theirs._idx}
            prompt_cache._fill(back, state | ring)
            assert torch.equal(back.keys, layer.keys)


def test_states_are_read_on_the_other_side(subtests):
    for preset in STATES:
        with subtests.test(preset=preset):
            check_states_are_read_on_the_other_side(preset)


def check_states_are_read_on_the_other_side(preset):
    config = config_named(preset)
    rng = np.random.default_rng(0)
    keys, values = (rng.standard_normal((1, 2, 420, 64)).astype(np.float32) for _ in "kv")
    ours, theirs = CompressedKVCache(config), MlxCache(config)
    for start, stop in ((0, 400), (400, 401), (401, 420)):
        part = (keys[:, :, start:stop], values[:, :, start:stop])
        ours.update_and_fetch(*map(torch.from_numpy, part))
        theirs.update_and_fetch(*map(mx.array, part))
    q = rng.standard_normal((1, 4, 1, 64)).astype(np.float32)

    def out(cache):
        return attend(torch.from_numpy(q), cache.view(), 0.125).numpy()

    def out_mlx(cache):
        return np.array(mlx_attend(mx.array(q), cache.keys_and_values()[0], 0.125))

    right = out(ours)
    moved = CompressedKVCache.from_state(to_torch(theirs.state))
    assert np.abs(out(moved) - out_mlx(theirs)).max() < 1e-4
    assert np.abs(out_mlx(MlxCache.from_state(to_mlx(ours.state))) - right).max() < 1e-4
    # A code at a boundary may differ, and an angle of few bits shows it.
    assert np.abs(out_mlx(theirs) - right).max() < 0.02
    again = CompressedKVCache.from_state(ours.state)
    for cache in (ours, again):  # into the page quantized last, whose exact tokens come back
        cache.trim(cache._count + 5)
    assert all(map(torch.equal, *(x.view().whole(torch.float32) for x in (ours, again))))


def test_windows_of_values_that_weights_had_turned():
    """A cache of a folded model of MLX, read for a model whose weights transform nothing."""
    config = replace(PRESETS["oscar-int4"], sink=16, recent=16, page=16)
    layer_maps = replace(sample(2, (64, 64)), digest="sample", layer="0")
    pairs = (
        maps.pair(np.array(x.down), np.array(x.up)) for x in (layer_maps.keys, layer_maps.values)
    )
    mine = maps.LayerMaps(*pairs, "sample", "0")
    keys, values = np.random.default_rng(0).standard_normal((2, 1, 2, 100, 64)).astype(np.float32)
    theirs = MlxCache(config, folded(layer_maps))
    theirs.update_and_fetch(mx.array(keys), layer_maps.values.store(mx.array(values)))
    plain = CompressedKVCache(config, mine)
    plain.update_and_fetch(*map(torch.from_numpy, (keys, values)))
    moved = CompressedKVCache.from_state(to_torch(theirs.state), partial(_maps, mine))
    other = partial(_maps, replace(mine, digest="another"))
    with pytest.raises(UserError, match="needs the calibration it was stored with"):
        CompressedKVCache.from_state(plain.state, other)
    for x, y in zip(*(c.view().whole(torch.float32) for c in (moved, plain)), strict=True):
        assert (x - y).abs().gt(1e-3).float().mean() < 5e-3


def test_a_broken_state_is_refused():
    cache = CompressedKVCache(PRESETS["int4"])
    cache.update_and_fetch(*(torch.randn(1, 1, 300, 64) for _ in "kv"))
    state = cache.state
    del state["pages"]["keys"]["scale"]
    with pytest.raises(UserError, match="parts missing or cut"):
        CompressedKVCache.from_state(state)
    with pytest.raises(UserError, match="no readable header"):
        CompressedKVCache.from_state({})
    with pytest.raises(UserError, match="rotations of a calibration"):
        CompressedKVCache(PRESETS["oscar-int2"])
