"""Tests the kernel for latents on this machine before it is used, which also builds it."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from mlxkv import faults
from mlxkv.cache.attention import attend
from mlxkv.cache.selftest import BOUND, PAGES, drain
from mlxkv.cache.stores import LatentCodes
from mlxkv.cache.view import BY_OPS, TILES, KernelPlan, View
from mlxkv.codec.maps import sample
from mlxkv.formats.config import CacheConfig
from mlxkv.metal import trust
from mlxkv.metal.launch import Factory

HEADS = 16  # query heads, where a model's are not known
_Key = tuple[CacheConfig, int, mx.Dtype, Factory, int]
_found: dict[_Key, str | None] = {}


def is_known(config: CacheConfig, dims: int, dtype: mx.Dtype, make: Factory, heads: int) -> bool:
    """Return whether it has been tried in this process."""
    return (config, dims, dtype, make, heads) in _found


def fault(
    config: CacheConfig, dims: int, dtype: mx.Dtype, make: Factory, heads: int = HEADS
) -> str | None:
    """Return why the kernel for latents of `dims` dims must not be used, or None: it is built and compared with
    plain ops, once in a process. An exception becomes the reason."""
    key = config, dims, dtype, make, heads
    if key not in _found:
        _found[key] = _trusted(*key) if make is mx.fast.metal_kernel else _fault(*key)
    return _found[key]


def _trusted(
    config: CacheConfig, dims: int, dtype: mx.Dtype, make: Factory, heads: int
) -> str | None:
    """As `_fault`, with the notes of earlier processes on a Mac."""
    place = ("latents", config, heads), dims, dtype, True
    trust.wait(*place)
    if reason := trust.why_not(*place):
        return reason
    with trust.trial(*place):
        reason = _fault(config, dims, dtype, make, heads)
    trust.note(*place[:3], reason is None, True, reason)
    return reason


def _fault(
    config: CacheConfig, dims: int, dtype: mx.Dtype, make: Factory, heads: int
) -> str | None:
    # Plain ops on the CPU are the reference: some GPUs lack a few of MLX's quantized products.
    with mx.stream(mx.cpu):
        count = PAGES * config.page
        x = mx.random.normal((1, 1, count, dims), key=mx.random.key(0)).astype(dtype)
        live, sink = x[:, :, 5:30], x[:, :, 40:44]
        queries = mx.random.normal((1, heads, 1, dims), key=mx.random.key(1)).astype(dtype)
        added = mx.random.normal((1, heads, 1, count + 29), key=mx.random.key(2)).astype(dtype)
        turned = sample(1, (dims, dims), config.fitted) if config.calibrated else None
        store = LatentCodes(config, (dims, dims), turned, plan=KernelPlan(TILES, make=make))
        store.append((x, x), PAGES)
        pages = store.read(0, PAGES)
        view = View(tuple(mx.contiguous(live) for _ in "kv"), (mx.contiguous(sink),) * 2, pages)
        plain = replace(view, pages=replace(pages, plan=BY_OPS))
        expected = attend(queries, plain, dims**-0.5, added).astype(mx.float32)
        mx.eval(expected, view.live, view.sink, store.arrays(), queries, added)
    try:
        ours = attend(queries, view, dims**-0.5, added).astype(mx.float32)
        mx.eval(ours)
    except Exception as error:  # a compiler or a driver may raise anything at all
        drain()
        return faults.reason(error)
    with mx.stream(mx.cpu):
        off = mx.sqrt(mx.mean((ours - expected) ** 2) / mx.mean(expected**2)).item()
    return None if off <= BOUND else f"attention over latents is off by {off:.2g}"
