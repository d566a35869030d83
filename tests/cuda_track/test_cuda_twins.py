"""What both tracks decide alike: room that stores give back, shares of maps, bits of page records."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import torch

from cuda_track.cache.adaptive import AdaptiveKVCache
from cuda_track.cache.runs import Segments
from cuda_track.cache.stores import Codes, codecs_of
from cuda_track.codec import maps, records
from cuda_track.codec.codec import Codec
from mlxkv.cache.adaptive import AdaptiveKVCache as MLXAdaptive
from mlxkv.cache.adaptive import Segments as MLXSegments
from mlxkv.cache.stores import Codes as MLXCodes
from mlxkv.codec import codec as mlx_codec
from mlxkv.codec import maps as mlx_maps
from mlxkv.codec import records as mlx_records
from mlxkv.errors import UserError
from mlxkv.formats.config import (
    Affine,
    Codebook,
    Fill,
    Half,
    Polar,
    PolarTree,
    Side,
)
from mlxkv.formats.names import parse_kv
from mlxkv.formats.records import side_layout, why_no_record
from mlxkv.formats.rules.observing import Observing
from mlxkv.formats.rules.runs import Runs

CPU = torch.device("cpu")


def test_stores_give_back_the_same_room():
    config = replace(parse_kv("int4"), page=16)
    x = np.random.default_rng(0).standard_normal((1, 1, 640, 64)).astype(np.float32)
    ours = Codes(config, codecs_of(config, (64, 64), None, CPU))
    theirs = MLXCodes(config, (64, 64))
    ours.append((torch.from_numpy(x),) * 2, 40)
    theirs.append((mx.array(x),) * 2, 40)
    rows = []
    for count in (40, 39, 38, 37, 20, 19, 18):
        for store in (ours, theirs):
            store.truncate(count)
        sizes = [[y.shape[2] for y in store.arrays()] for store in (ours, theirs)]
        assert sizes[0] == sizes[1]
        rows.append(sizes[0][0])
    assert rows == [16 * n for n in (40, 40, 40, 37, 20, 20, 18)]


def test_one_policy_of_runs_and_of_observing():
    """Neither track has its own: which runs are joined, trimmed or thinned, what is learned and kept."""
    for name in ("append", "rebase", "read", "truncate", "keep", "by_token", "state", "restore"):
        assert all(name not in vars(kind) for kind in (Segments, MLXSegments)) and hasattr(
            Runs, name
        )
    for name in ("_observe", "_learn", "_teach", "_keep", "_seal_rest", "cut"):
        assert all(name not in vars(kind) for kind in (AdaptiveKVCache, MLXAdaptive)) and hasattr(
            Observing, name
        )


@pytest.mark.parametrize("size", (1, 2, 4, 3))
def test_maps_are_cut_alike(size):
    theirs = mlx_maps.sample(4, (64, 64), ("balanced", "balanced"))
    pairs = (maps.pair(np.array(x.down), np.array(x.up)) for x in (theirs.keys, theirs.values))
    ours = maps.LayerMaps(*pairs, digest="file", layer="7")
    theirs = replace(theirs, digest="file", layer="7")
    if size == 3:
        for one, cut in ((ours, maps.cut), (theirs, mlx_maps.cut)):
            with pytest.raises(UserError, match="4 kv heads of 7 cannot be shared by 3 processes"):
                cut(one, 0, 3)
        return
    for rank in range(size):
        mine, right = maps.cut(ours, rank, size), mlx_maps.cut(theirs, rank, size)
        assert (mine.digest, mine.layer) == (right.digest, right.layer)
        for name in ("keys", "values"):
            down = getattr(mine, name).down.numpy()
            assert np.array_equal(down, np.array(getattr(right, name).down))


SPECS = (
    *(Affine(bits, group) for bits in (2, 3, 4, 8) for group in (32, 0)),
    *(Affine(4, 64, True), Affine(3, 0, axis="channel")),
    *(Codebook(3), Polar(), PolarTree(), Half()),
)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_records_are_the_same_bits(spec):
    tried = 0
    for dims in (64, 80, 96, 128):
        for keys in (True, False):
            if why_no_record(spec, dims, 64, keys):
                continue
            at, rng = side_layout(spec, dims, 64, keys), np.random.default_rng(dims)
            codes = rng.integers(0, 2**at.bits, (2, 1, 64, dims)).astype(np.uint32)
            stored = {
                name: rng.standard_normal((2, 1, 64, at.groups)).astype(np.float16)
                for name in at.numbers
            }
            theirs = {name: mx.array(x) for name, x in stored.items()}
            right = np.array(mlx_records.pack(mx.array(codes), theirs, at)).view(np.int32)
            ours = {name: torch.from_numpy(x) for name, x in stored.items()}
            words = records.pack(torch.from_numpy(codes.astype(np.int64)), ours, at)
            assert np.array_equal(words.numpy(), right)
            back, numbers = records.unpack(words, at)
            assert np.array_equal(back.numpy(), codes)
            assert all(np.array_equal(numbers[name].numpy(), x) for name, x in stored.items())
            tried += 1
    assert tried


@pytest.mark.parametrize("widths", [(4, 2), (8, 3, 1), (3, 3, 2, 1, 1), (4, 4, 3, 3, 2, 2, 1, 1)])
def test_records_of_bits_by_direction_are_the_same_bits(widths):
    spec, rng = Fill(2.0, widths), np.random.default_rng(len(widths))
    x = rng.standard_normal((2, 1, 64, spec.dims)).astype(np.float32)
    ours, theirs = Codec(Side(spec), spec.dims, 64), mlx_codec.Codec(Side(spec), spec.dims, 64)
    stored = ours.encode(torch.from_numpy(x))
    codes = theirs.encode(mx.array(x))
    right = mlx_records.to_records({"keys": codes, "values": codes}, (theirs, theirs))
    mine = records.to_records({"keys": stored, "values": stored}, (ours, ours))
    assert mine.keys() == right.keys()
    for name, found in mine.items():
        assert np.array_equal(found.numpy().view(np.int32), np.array(right[name]).view(np.int32))
    back = records.as_codes(mine, (ours, ours))
    for side in ("keys", "values"):
        for name, found in back[side].items():
            assert np.array_equal(found.numpy(), stored[name].numpy())
