"""Decode attention, as a model calls it, beside `mx.fast` SDPA and mlx-lm's quantized SDPA."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import mlx.core as mx

from mlxkv import attention, sealed
from mlxkv.bench.case import BOUNDS, Shape, filled, reference, relative_rms, stored_bytes
from mlxkv.bench.timing import chain, interleaved, middle
from mlxkv.config import CacheConfig
from mlxkv.fit import machine_memory
from mlxkv.metal.launch import backend

COLD_BYTES = 200_000_000  # more than twice the L2 of any GPU we know: copies rotate over so much
COPIES = 4
MEMORY_SHARE = 8  # the copies of one preset or baseline take at most this part of the memory
SPARE = 256  # tokens of room in mlx-lm's own cache, which grows by so many
MLX_LM_GROUP = 64
MLX_LM_BITS = (2, 3, 4, 6, 8)
TREE_BESIDE = 4  # bits of mlx-lm's codes beside polar trees, which take nearly as many
SDPA = "sdpa"


def copies_of(bytes_each: int, calls: int) -> int:
    """How many copies of a cache rotate, as far as memory allows."""
    if backend() == "cpu":
        return min(calls, COPIES)
    info = mx.device_info()
    memory = info.get("memory_size") or info.get("total_memory") or machine_memory()
    wanted = max(COPIES, min(calls, -(-COLD_BYTES // bytes_each)))
    return max(1, min(wanted, memory // MEMORY_SHARE // bytes_each))


def rows(
    shape: Shape,
    tokens: int,
    presets: dict[str, CacheConfig],
    dtype: mx.Dtype,
    bandwidth: float,
    calls: int,
    rounds: int,
    with_mlx_lm: bool,
    done: Callable[[], None] = lambda: None,
    turn: AbstractContextManager | None = None,
) -> list[dict]:
    """One row per preset; all of them and the baselines are timed in one interleaved run, inside
    `turn`: kernels are built before."""
    mx.random.seed(0)
    scale = shape.dims**-0.5
    first = shape.queries(dtype)
    plain_bytes = shape.values(tokens) * dtype.size
    tasks = {SDPA: _sdpa(shape, tokens, dtype, scale, first, calls, plain_bytes)}
    out = []
    for name, config in presets.items():
        row, task = _ours(name, config, shape, tokens, dtype, scale, first, calls)
        row["floor_us"] = 1e6 * row.pop("bytes") / bandwidth
        out.append(row)
        if task:
            tasks[name] = task
    failed = {}
    if with_mlx_lm:
        for bits in {_bits_beside(config) for config in presets.values()}:
            task = _mlx_lm(bits, shape, tokens, dtype, scale, first, calls)
            try:
                task()
                tasks[_mlx_lm_name(bits)] = task
            except Exception as error:  # no kernel for this shape, no memory: MLX raises anything
                lines = str(error).strip().splitlines() or [type(error).__name__]
                failed[_mlx_lm_name(bits)] = lines[0][:120]
    for task in tasks.values():
        task()
    with turn or nullcontext():
        times = {k: middle(v) for k, v in interleaved(tasks, rounds, done).items()}
    for row, config in zip(out, presets.values(), strict=True):
        ours, plain = times.get(row["preset"]), times[SDPA]
        row["sdpa_us"], row["sdpa_build_us"] = 1e6 * plain.run, 1e6 * plain.build
        row["sdpa_floor_us"] = 1e6 * plain_bytes / bandwidth
        row |= {"us": None, "build_us": None, "ratio": None, "of_floor": None}
        if ours:
            row |= {"us": 1e6 * ours.run, "build_us": 1e6 * ours.build}
            row |= {"ratio": plain.run / ours.run, "of_floor": row["floor_us"] / row["us"]}
        theirs = _mlx_lm_name(_bits_beside(config))
        row["mlx_lm_us"] = 1e6 * times[theirs].run if theirs in times else None
        row["mlx_lm_reason"] = failed.get(theirs)
    return out


def _ours(name, config, shape, tokens, dtype, scale, first, calls):
    """The row so far, and what times it: None where the result is wrong."""
    views = [filled(config, shape, tokens, dtype)]
    size = stored_bytes(config, shape, views[0])
    rms = relative_rms(attention.attend(first, views[0], scale), reference(first, views[0], scale))
    right = rms <= BOUNDS[dtype]  # a NaN is not
    row = {
        "what": "attend",
        "shape": str(shape),
        "tokens": tokens,
        "preset": name,
        "by": sealed.decoder(config, (shape.dims, shape.dims), dtype),
        "bytes": size,
        "rms": rms,
        "bound": BOUNDS[dtype],
        "wrong": not right,
    }
    if not right:
        return row, None
    while len(views) < copies_of(size, calls):
        views.append(filled(config, shape, tokens, dtype))
    mx.clear_cache()
    row["copies"] = len(views)
    return row, partial(chain, lambda q, v: attention.attend(q, v, scale), first, views, calls)


def _sdpa(shape, tokens, dtype, scale, first, calls, size):
    """Keys and values as mlx-lm's cache holds them: room for some more, and a slice of it."""
    copies = []
    for _ in range(copies_of(size, calls)):
        copies.append([x[:, :, :tokens] for x in shape.pair(tokens + SPARE, dtype)])
        mx.eval(copies[-1])

    def call(q, pair):
        return mx.fast.scaled_dot_product_attention(q, *pair, scale=scale)

    return partial(chain, call, first, copies, calls)


def _bits_beside(config: CacheConfig) -> int:
    """Of mlx-lm's codes that stand beside a preset: as wide as those of its keys."""
    return getattr(config.keys.quantizer, "bits", None) or TREE_BESIDE


def _mlx_lm_name(bits: int) -> str:
    return f"mlx-lm {bits}-bit"


def _mlx_lm(bits, shape, tokens, dtype, scale, first, calls):
    """mlx-lm's attention of `--kv-bits`; it fails when called where something is missing."""
    from mlx_lm.models.base import quantized_scaled_dot_product_attention  # takes seconds

    quantize = partial(mx.quantize, group_size=MLX_LM_GROUP, bits=bits)
    copies: list = []

    def call(q, pair):
        return quantized_scaled_dot_product_attention(
            q, *pair, scale=scale, mask=None, group_size=MLX_LM_GROUP, bits=bits
        )

    def run():
        size = shape.values(tokens) * (bits + 32 / MLX_LM_GROUP) / 8
        while len(copies) < copies_of(int(size), calls):
            copies.append([quantize(x) for x in shape.pair(tokens, dtype)])
            mx.eval(copies[-1])
        return chain(call, first, copies, calls)

    return run
