"""Time encoding into a store and decoding from it, against the bandwidth of a copy."""

from __future__ import annotations

from functools import partial
from math import log2

import mlx.core as mx

from mlxkv.bench.kernels.case import KernelShape, rotations
from mlxkv.bench.spread import allotted
from mlxkv.cache import choose
from mlxkv.cache.stores import Codes, Records
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.sizes import GROWTH
from mlxkv.metal.launch import device_type
from mlxkv.metal.timing import seconds_of

CALLS, CALLS_CPU = 8, 2  # per eval
REPEATS = 5
PAGES = 8  # quantized one after the other, to time one
FOOTNOTE = (
    "encode, dequantize: append and decode of the store, keys and values; bytes: the values plus their "
    "codes and scales\n"
    "GFLOP/s: counted as 2.5 D log2 D per vector, as in the SRFT paper, in every implementation"
)


def row(
    name: str,
    config: CacheConfig,
    shape: KernelShape,
    tokens: int,
    dtype: mx.Dtype,
    bandwidth: float,
) -> dict:
    """Return one row. tokens: whole pages. bandwidth: of a copy, bytes per second."""
    mx.random.seed(0)
    config, dims = allotted(config, shape.dims), (shape.dims, shape.dims)
    plan = choose.plan(config, dims, dtype)
    new = partial(choose.store, plan, rotations(config, shape))
    pages, calls = tokens // config.page, CALLS_CPU if device_type() == "cpu" else CALLS
    inputs = [shape.pair(tokens, dtype) for _ in range(2)]
    mx.eval(inputs)

    def encode() -> list[mx.array]:
        out: list[mx.array] = []
        for i in range(calls):
            pair = inputs[i % 2]
            if out:  # no overlap with the previous call
                keys, values = mx.depends(list(pair), out)
                pair = keys, values
            store = new()
            store.append(pair, pages)
            out = store.arrays()
        return out

    seconds = seconds_of(encode, REPEATS) / calls
    stores = []
    for pair in inputs:
        stores.append(new())
        stores[-1].append(pair, pages)
        mx.eval(stores[-1].arrays())

    def dequantize() -> list[mx.array]:
        views = [stores[i % 2].read(0, pages) for i in range(calls)]
        return [view.decode(side, dtype) for view in views for side in (0, 1)]

    dequantize_seconds = seconds_of(dequantize, REPEATS) / calls
    values = shape.values(tokens)
    size = values * (dtype.size + config.bits_per_value(*dims) / 8)
    vectors = values // shape.dims
    return {
        "what": "encode",
        "shape": str(shape),
        "tokens": tokens,
        "preset": name,
        "by": plan.label,
        "encode_ns_per_vector": 1e9 * seconds / vectors,
        "encode_gb_s": size / seconds / 1e9,
        "encode_of_copy": size / seconds / bandwidth,
        "encode_gflop_s": 2.5 * shape.dims * log2(shape.dims) * vectors / seconds / 1e9,
        "page_us": 1e6 * _page_seconds(new(), shape, dtype),
        "unseal_gb_s": size / dequantize_seconds / 1e9,
        "unseal_of_copy": size / dequantize_seconds / bandwidth,
    }


def _page_seconds(store: Codes | Records, shape: KernelShape, dtype: mx.Dtype) -> float:
    """Return the seconds to quantize one page of all heads into spare capacity."""
    size = store.config.page
    page = shape.pair(size, dtype)
    pages_before = GROWTH * PAGES  # with fewer, truncate would free the room
    store.append(shape.pair(size * (pages_before + PAGES), dtype), pages_before + PAGES)
    mx.eval(store.arrays(), page)

    def quantize() -> list[mx.array]:
        store.truncate(pages_before)
        for _ in range(PAGES):
            store.append(tuple(mx.depends(list(page), store.arrays())), 1)
        return store.arrays()

    return seconds_of(quantize, REPEATS) / PAGES
