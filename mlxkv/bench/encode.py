"""Encoding into a store and decoding out of it, against a copy."""

from __future__ import annotations

from math import log2

import mlx.core as mx

from mlxkv import encoding, sealed
from mlxkv.bench.case import Shape, rotations
from mlxkv.bench.timing import seconds_of
from mlxkv.config import CacheConfig
from mlxkv.metal.launch import backend
from mlxkv.pages import GROWTH

CALLS, CALLS_CPU = 8, 2  # per eval
REPEATS = 5
PAGES = 8  # sealed one after the other, for the latency of one
FOOTNOTE = (
    "encode, unseal: seconds of the store's own append and decode, keys and values; bytes: values "
    "on one side, codes with scales on the other\n"
    "GFLOP/s: 2.5 D log2 D per vector, the count of the SRFT paper for the FFT form, whatever the "
    "implementation does"
)


def row(
    name: str,
    config: CacheConfig,
    shape: Shape,
    tokens: int,
    dtype: mx.Dtype,
    bandwidth: float,
    way: str = encoding.KERNEL,
) -> dict:
    """tokens: a whole number of pages. way: of `mlxkv.encoding`."""
    with encoding.using(way):
        return _row(name, config, shape, tokens, dtype, bandwidth)


def _row(
    name: str, config: CacheConfig, shape: Shape, tokens: int, dtype: mx.Dtype, bandwidth: float
) -> dict:
    mx.random.seed(0)
    dims = (shape.dims, shape.dims)
    pages, calls = tokens // config.page, CALLS_CPU if backend() == "cpu" else CALLS
    inputs = [shape.pair(tokens, dtype) for _ in range(2)]
    mx.eval(inputs)

    def encode() -> list[mx.array]:
        out: list[mx.array] = []
        for i in range(calls):
            pair = inputs[i % 2]
            if out:  # one after the other
                pair = mx.depends(list(pair), out)
            store = sealed.store(config, dims, dtype, rotations(config, shape))
            store.append(tuple(pair), pages)
            out = store.arrays()
        return out

    seconds = seconds_of(encode, REPEATS) / calls
    stores = []
    for pair in inputs:
        stores.append(sealed.store(config, dims, dtype, rotations(config, shape)))
        stores[-1].append(pair, pages)
        mx.eval(stores[-1].arrays())

    def unseal() -> list[mx.array]:
        views = [stores[i % 2].read(0, pages) for i in range(calls)]
        return [view.decode(side, dtype) for view in views for side in (0, 1)]

    unseal_seconds = seconds_of(unseal, REPEATS) / calls
    values = shape.values(tokens)
    size = values * (dtype.size + config.bits_per_value(*dims) / 8)
    vectors = values // shape.dims
    return {
        "what": "encode",
        "shape": str(shape),
        "tokens": tokens,
        "preset": name,
        "by": sealed.decoder(config, dims, dtype),
        "encode": encoding.now(),
        "encode_ns_per_vector": 1e9 * seconds / vectors,
        "encode_gb_s": size / seconds / 1e9,
        "encode_of_copy": size / seconds / bandwidth,
        "encode_gflop_s": 2.5 * shape.dims * log2(shape.dims) * vectors / seconds / 1e9,
        "page_us": 1e6 * _page_seconds(config, shape, dtype),
        "unseal_gb_s": size / unseal_seconds / 1e9,
        "unseal_of_copy": size / unseal_seconds / bandwidth,
    }


def _page_seconds(config: CacheConfig, shape: Shape, dtype: mx.Dtype) -> float:
    """Sealing one page of all heads into room that is there, one page after the other."""
    store = sealed.store(config, (shape.dims, shape.dims), dtype, rotations(config, shape))
    page = shape.pair(config.page, dtype)
    before = GROWTH * PAGES  # with fewer, truncate would give the room back
    store.append(shape.pair(config.page * (before + PAGES), dtype), before + PAGES)
    mx.eval(store.arrays(), page)

    def seal() -> list[mx.array]:
        store.truncate(before)
        for _ in range(PAGES):
            store.append(tuple(mx.depends(list(page), store.arrays())), 1)
        return store.arrays()

    return seconds_of(seal, REPEATS) / PAGES
