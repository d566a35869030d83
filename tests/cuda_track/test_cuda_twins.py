"""What both tracks decide alike: room that stores give back, shares of maps, bits of page records."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import torch

from cuda_track.codec import maps, records
from cuda_track.codec.codec import Codec
from mlxkv.codec import codec as mlx_codec
from mlxkv.codec import maps as mlx_maps
from mlxkv.codec import records as mlx_records
from mlxkv.errors import UserError
from mlxkv.formats.config import Fill, Side


def test_maps_are_cut_alike(subtests):
    for size in (1, 2, 4, 3):
        with subtests.test(size=size):
            theirs = mlx_maps.sample(4, (64, 64), ("balanced", "balanced"))
            pairs = (
                maps.pair(np.array(x.down), np.array(x.up)) for x in (theirs.keys, theirs.values)
            )
            ours = maps.LayerMaps(*pairs, digest="file", layer="7")
            theirs = replace(theirs, digest="file", layer="7")
            if size == 3:
                for one, cut in ((ours, maps.cut), (theirs, mlx_maps.cut)):
                    with pytest.raises(
                        UserError, match="4 kv heads of 7 cannot be shared by 3 processes"
                    ):
                        cut(one, 0, 3)
                continue
            for rank in range(size):
                mine, right = maps.cut(ours, rank, size), mlx_maps.cut(theirs, rank, size)
                assert (mine.digest, mine.layer) == (right.digest, right.layer)
                for name in ("keys", "values"):
                    down = getattr(mine, name).down.numpy()
                    assert np.array_equal(down, np.array(getattr(right, name).down))


def test_records_of_bits_by_direction_are_the_same_bits(subtests):
    for widths in [(4, 2), (8, 3, 1), (3, 3, 2, 1, 1), (4, 4, 3, 3, 2, 2, 1, 1)]:
        with subtests.test(widths=widths):
            spec, rng = Fill(2.0, widths), np.random.default_rng(len(widths))
            x = rng.standard_normal((2, 1, 64, spec.dims)).astype(np.float32)
            ours, theirs = (
                Codec(Side(spec), spec.dims, 64),
                mlx_codec.Codec(Side(spec), spec.dims, 64),
            )
            stored = ours.encode(torch.from_numpy(x))
            codes = theirs.encode(mx.array(x))
            right = mlx_records.to_records({"keys": codes, "values": codes}, (theirs, theirs))
            mine = records.to_records({"keys": stored, "values": stored}, (ours, ours))
            assert mine.keys() == right.keys()
            for name, found in mine.items():
                assert np.array_equal(
                    found.numpy().view(np.int32), np.array(right[name]).view(np.int32)
                )
            back = records.as_codes(mine, (ours, ours))
            for side in ("keys", "values"):
                for name, found in back[side].items():
                    assert np.array_equal(found.numpy(), stored[name].numpy())
