"""Bits by direction in records: what is stored, and kernels beside plain ops and the law."""

import mlx.core as mx
import numpy as np
import pytest

from mlxkv.codec import records
from mlxkv.formats.lowrank import DIMS, Fill
from mlxkv.formats.records import side_layout

PATTERNS = [  # all widths; an odd number of quarters; half a row behind whole ones; half a row alone
    (8, 4, 3, 2, 1),
    (8, 8, 4),
    (3, 3, 2, 1),
    (4, 3, 3, 2, 2, 1, 1),
    (2, 1),
    (3, 2),
    (2,),
    (1,),
    (1, 1, 1, 1, 1),
    (3, 3, 3),
]


def ids(widths):
    return "".join(map(str, widths))


@pytest.mark.parametrize("keys", (True, False))
@pytest.mark.parametrize("widths", PATTERNS, ids=ids)
def test_records_hold_every_bit_and_take_the_bytes_that_are_counted(widths, keys):
    spec = Fill(2.0, widths)
    at = side_layout(spec, spec.dims, 16, keys)
    assert 32 * at.words == 16 * spec.dims * spec.bits_per_value(spec.dims, 16)
    rng = np.random.default_rng(0)
    top = 2 ** np.repeat(widths, DIMS)
    codes = rng.integers(0, top, (2, 1, 48, spec.dims))
    scale = mx.array(rng.standard_normal((2, 1, 48, 1)).astype(np.float16))
    words = records.pack(mx.array(codes), {"scale": scale}, at)
    assert words.shape == (2, 1, 3, at.words)
    back, numbers = records.unpack(words, at)
    np.testing.assert_array_equal(np.array(back), codes)
    assert mx.array_equal(numbers["scale"], scale)
