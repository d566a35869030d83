"""Time decode attention, as called by a model, against `mx.fast` SDPA and mlx-lm's quantized SDPA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import mlx.core as mx

from mlxkv.bench.kernels.case import KernelShape, filled, pages_of, stored_bytes
from mlxkv.bench.options import BITS, MLX_LM_GROUP
from mlxkv.bench.spread import allotted
from mlxkv.cache import attention, choose
from mlxkv.cache.selftest import relative_rms
from mlxkv.cache.view import View
from mlxkv.errors import brief
from mlxkv.formats.config import CacheConfig
from mlxkv.metal.gpu import array_memory
from mlxkv.metal.launch import device_type
from mlxkv.metal.timing import Chain, chain, interleaved, middle

COLD_BYTES = 200_000_000  # of rotating copies: more than twice the L2 of any GPU
COPIES = 4
MEMORY_SHARE = 8  # copies of one preset or baseline use at most 1/8 of the memory
SPARE = 256  # tokens: the step by which mlx-lm's own cache grows
TREE_BESIDE = 4  # bits of mlx-lm's codes to compare with polar trees, of nearly equal size
SDPA = "sdpa"
Task = Callable[[], Chain]


@dataclass(frozen=True)
class DecodeStep:
    """One decode step over `tokens` stored tokens, timed in chains of `calls` calls."""

    shape: KernelShape
    tokens: int
    dtype: mx.Dtype
    calls: int

    @cached_property
    def first(self) -> mx.array:
        """The query of the first call."""
        return self.shape.queries(self.dtype)

    @property
    def scale(self) -> float:
        return self.shape.dims**-0.5

    @property
    def plain_bytes(self) -> int:
        """Bytes of keys and values in full precision."""
        return self.shape.values(self.tokens) * self.dtype.size

    def chain(self, call: Callable, copies: list) -> Chain:
        return chain(call, self.first, copies, self.calls)


def copies_of(bytes_each: int, calls: int) -> int:
    """Return how many copies of a cache rotate, as far as memory allows."""
    if device_type() == "cpu":
        return min(calls, COPIES)
    count = max(COPIES, min(calls, -(-COLD_BYTES // bytes_each)))
    return max(1, min(count, array_memory() // MEMORY_SHARE // bytes_each))


def rows(
    shape: KernelShape,
    tokens: int,
    *,
    presets: dict[str, CacheConfig],
    dtype: mx.Dtype,
    bandwidth: float,
    calls: int,
    rounds: int,
    with_mlx_lm: bool,
) -> list[dict]:
    """Return one row per preset. Presets and baselines are timed in one interleaved run, after their kernels are
    built. bandwidth: of the memory, bytes per second."""
    mx.random.seed(0)
    step = DecodeStep(shape, tokens, dtype, calls)
    tasks = {SDPA: _sdpa(step)}
    out = []
    for name, config in presets.items():
        row, task = _ours(name, config, step)
        row["floor_us"] = 1e6 * row.pop("bytes") / bandwidth
        out.append(row)
        if task:
            tasks[name] = task
    failed = {}
    if with_mlx_lm:
        for bits in {_bits_beside(config) for config in presets.values()}:
            task = _mlx_lm(bits, step)
            try:
                task()
                tasks[_mlx_lm_name(bits)] = task
            except Exception as error:  # no kernel for this shape, out of memory: any type
                failed[_mlx_lm_name(bits)] = brief(error)
    for task in tasks.values():
        task()
    times = {k: middle(v) for k, v in interleaved(tasks, rounds).items()}
    for row, config in zip(out, presets.values(), strict=True):
        ours, plain = times.get(row["preset"]), times[SDPA]
        row["sdpa_us"], row["sdpa_build_us"] = 1e6 * plain.run, 1e6 * plain.build
        row["sdpa_floor_us"] = 1e6 * step.plain_bytes / bandwidth
        row |= {"us": None, "build_us": None, "ratio": None, "of_floor": None}
        if ours:
            row |= {"us": 1e6 * ours.run, "build_us": 1e6 * ours.build}
            row |= {"ratio": plain.run / ours.run, "of_floor": row["floor_us"] / row["us"]}
        theirs = _mlx_lm_name(_bits_beside(config))
        row["mlx_lm_us"] = 1e6 * times[theirs].run if theirs in times else None
        row["mlx_lm_reason"] = failed.get(theirs)
    return out


def _ours(name: str, config: CacheConfig, step: DecodeStep) -> tuple[dict, Task | None]:
    """Return a partial row, and its task: None if the result is wrong."""
    shape, first, scale = step.shape, step.first, step.scale
    config = allotted(config, shape.dims)
    views = [filled(config, shape, step.tokens, step.dtype)]
    size = stored_bytes(config, shape, views[0])
    rms = relative_rms(attention.attend(first, views[0], scale), reference(first, views[0], scale))
    right = rms <= BOUNDS[step.dtype]  # False for NaN
    row = {
        "what": "attend",
        "shape": str(shape),
        "tokens": step.tokens,
        "preset": name,
        "by": choose.plan(config, (shape.dims, shape.dims), step.dtype).label,
        "bytes": size,
        "rms": rms,
        "bound": BOUNDS[step.dtype],
        "wrong": not right,
    }
    if not right:
        return row, None
    while len(views) < copies_of(size, step.calls):
        views.append(filled(config, shape, step.tokens, step.dtype))
    mx.clear_cache()
    row["copies"] = len(views)
    return row, partial(step.chain, lambda q, v: attention.attend(q, v, scale), views)


def _sdpa(step: DecodeStep) -> Task:
    """Return SDPA over slices of larger buffers, as in mlx-lm's cache."""
    copies = []
    for _ in range(copies_of(step.plain_bytes, step.calls)):
        pair = step.shape.pair(step.tokens + SPARE, step.dtype)
        copies.append([x[:, :, : step.tokens] for x in pair])
        mx.eval(copies[-1])

    def call(q, pair):
        return mx.fast.scaled_dot_product_attention(q, *pair, scale=step.scale)

    return partial(step.chain, call, copies)


def _bits_beside(config: CacheConfig) -> int:
    """Return the bits of mlx-lm's codes to compare with a preset: those of its keys; for mixed bits the fewest of
    equal size."""
    quantizer = config.keys.quantizer
    if (budget := quantizer.budget) is not None:
        return next((bits for bits in BITS if bits + 32 / MLX_LM_GROUP >= budget), BITS[-1])
    return quantizer.code_bits or TREE_BESIDE


def _mlx_lm_name(bits: int) -> str:
    return f"mlx-lm {bits}-bit"


def _mlx_lm(bits: int, step: DecodeStep) -> Task:
    """Return mlx-lm's attention over a quantized cache; the call fails if this machine lacks a kernel."""
    from mlx_lm.models.base import quantized_scaled_dot_product_attention  # takes seconds

    quantize = partial(mx.quantize, group_size=MLX_LM_GROUP, bits=bits)
    copies: list = []

    def call(q, pair):
        return quantized_scaled_dot_product_attention(
            q, *pair, scale=step.scale, mask=None, group_size=MLX_LM_GROUP, bits=bits
        )

    def run() -> Chain:
        size = step.shape.values(step.tokens) * (bits + 32 / MLX_LM_GROUP) / 8
        while len(copies) < copies_of(int(size), step.calls):
            copies.append([quantize(x) for x in step.shape.pair(step.tokens, step.dtype)])
            mx.eval(copies[-1])
        return step.chain(call, copies)

    return run


# Largest accepted relative_rms(result, reference): the result is rounded to its dtype.
BOUNDS = {mx.float32: 2e-3, mx.float16: 5e-3, mx.bfloat16: 1e-2}


def reference(queries: mx.array, view: View, scale: float) -> mx.array:
    """Compute attention over the decoded pages in float32, one query head at a time: [B, H, 1, Dv].

    Uses sums of products, because some GPUs compute matrix products in TF32.
    """
    sides, pages = [], pages_of(view)
    for side in (0, 1):
        parts = [pages.decode(side, mx.float32), view.recent[side].astype(mx.float32)]
        if view.sink is not None:
            parts.insert(0, view.sink[side].astype(mx.float32))
        sides.append(mx.concatenate(parts, axis=2))
    batch, heads = queries.shape[:2]
    group = heads // sides[0].shape[1]
    rows = []
    for b in range(batch):
        for h in range(heads):
            keys, values = (x[b, h // group] for x in sides)
            scores = (keys * queries[b, h].astype(mx.float32)).sum(-1) * scale
            p = mx.softmax(scores, axis=-1, precise=True)
            rows.append((values * p[:, None]).sum(0))
            mx.eval(rows[-1])
    return mx.stack(rows).reshape(batch, heads, 1, -1)
