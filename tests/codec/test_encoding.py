"""Pages encoded by matrix products on the CPU, in both layouts, against the kernels and plain ops."""

import mlx.core as mx
import numpy as np
import pytest
from on_emulator import make

from mlxkv.cache.stores import Records
from mlxkv.codec import encoding
from mlxkv.codec.maps import sample
from mlxkv.codec.records import to_codes
from mlxkv.formats.presets import PRESETS

DIMS = 64
PRODUCTS = (encoding.ROWS, encoding.COLUMNS)


@pytest.fixture(scope="module")
def pair():
    mx.random.seed(3)
    return tuple(mx.random.normal((2, 2, 256, DIMS)).astype(mx.float16) for _ in range(2))


def records(preset: str, way: str, pair) -> Records:
    config = PRESETS[preset]
    turns = sample(2, (DIMS, DIMS), config.fitted) if config.calibrated else None
    store = Records(config, (DIMS, DIMS), make, layer_maps=turns, way=way)
    store.append(pair, 1)
    store.append(pair, 1, config.page)
    return store


def test_products_write_the_records_of_the_kernel(subtests, pair):
    for way in PRODUCTS:
        for preset in ("int4", "int2", "srft-int4+g64", "srft-int4", "oscar-int2"):
            with subtests.test(way=way, preset=preset):
                ours, theirs = (
                    to_codes(store.state, store.codecs)
                    for store in (
                        records(preset, way, pair),
                        records(preset, encoding.KERNEL, pair),
                    )
                )
                for side in ("keys", "values"):
                    for name, x in ours[side].items():
                        a, b = np.array(x), np.array(theirs[side][name])
                        if name == "codes":  # a value at a tie may fall to the other side
                            assert np.mean(a != b) < 0.01, (side, name)
                        else:
                            np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3)
