"""Kernels prove themselves on this machine before they are used, which also warms them up."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

import mlx.core as mx

from mlxkv import encoding, faults, kernels, tiles, trust
from mlxkv.calibrated import sample
from mlxkv.config import CacheConfig
from mlxkv.metal.launch import Factory

BOUND = 0.01  # rms against plain ops; 16-bit outputs and TF32 products stay below half of it
# The same of what was encoded behind a product with a rotation. A code that falls to the other side
# of a tie is off by a step, and a product whose factors are rounded (TF32) brings some to ties.
SEAL_BOUND = 0.06
# A prefill goes through MLX's attention in the model's type, of keys and values rounded to it.
PREFILL_BOUND = 0.02
SIGN_BOUND = 2 * SEAL_BOUND  # a code that falls to the other side changes what signs are taken of
PAGES = 16  # enough for several splits to be merged
MOST_HEADS = 2  # kv heads of a trial; how many query heads read each is what kernels are built for


@dataclass(frozen=True)
class Case:
    """How a model attends, as far as kernels are built for it: query heads, kv heads, whether there
    are logits of attention sinks."""

    heads: int = 8
    kv_heads: int = 2
    sinks: bool = False

    @property
    def small(self) -> Case:
        """The same with few heads."""
        kv_heads = min(MOST_HEADS, self.kv_heads)
        return replace(
            self, heads=max(1, self.heads // self.kv_heads) * kv_heads, kv_heads=kv_heads
        )

    def steps(self, dims: int, make: Factory) -> list[int]:
        """New tokens of the calls that have to be tried, up to `kernels.MOST_NEW`: one for each number of
        query rows that a threadgroup of the portable body is built for. dims: the largest stored."""
        rows = self.heads // self.kv_heads
        tiles_ = {}
        for new in range(1, kernels.MOST_NEW + 1):
            tiles_.setdefault(kernels.rows_of_tile(dims, rows * new, make), new)
        return list(tiles_.values())


CASE = Case()


@dataclass(frozen=True)
class Outcome:
    """What a test of kernels found. errors: rms against plain ops of attend, keys, values and prefill
    (all on the codes of the kernels) and of seal; ties: share of values whose code fell to the other
    side. reason: why they are not used, in a line, or None; detail: all that a compiler or a driver said.
    built: whether there was something to run. seconds: to build them and to run them once."""

    errors: dict[str, float]
    ties: float
    reason: str | None
    built: bool = True
    seconds: float = 0.0
    detail: str = ""


_Key = tuple[CacheConfig, int, mx.Dtype, Factory, bool]
_found: dict[_Key, dict[Case, Outcome]] = {}


def fault(
    config: CacheConfig,
    dims: int,
    dtype: mx.Dtype,
    make: Factory,
    tiled: bool = False,
    case: Case | None = None,
) -> str | None:
    """What is wrong with the kernels of this format for heads of `dims`, or None."""
    return test(config, dims, dtype, make, tiled, case).reason


def is_known(
    config: CacheConfig, dims: int, dtype: mx.Dtype, make: Factory, case: Case | None = None
) -> bool:
    """Whether either body has been tried in this process, so that nothing is left to build."""
    found = (_found.get((config, dims, dtype, make, tiled), {}) for tiled in (False, True))
    return any(one if case is None else case.small in one for one in found)


def test(
    config: CacheConfig,
    dims: int,
    dtype: mx.Dtype,
    make: Factory,
    tiled: bool = False,
    case: Case | None = None,
) -> Outcome:
    """Seal pages both ways and compare; then attend to those of the kernels both ways. Once in a
    process. case: None takes what is known of any, the worst of it.

    Whatever the kernels raise is a reason, never an error.
    """
    known = _found.setdefault((config, dims, dtype, make, tiled), {})
    if case is None and known:
        return next((one for one in known.values() if one.reason), next(iter(known.values())))
    case = (case or CASE).small
    if case not in known:
        on_trial, on_mac = nullcontext(), make is mx.fast.metal_kernel
        place = kernels.record_layout(config, *config.dims(dims, dims)), dims, dtype, tiled
        if on_mac:
            on_trial = trust.trial(*place)
        with on_trial:
            found = _test(config, dims, dtype, make, tiled, case)
        if on_mac and not (found.reason and faults.is_of_memory(RuntimeError(found.detail))):
            trust.note(*place[:3], found.reason is None, tiled, found.reason)
        known[case] = found
    return known[case]


def _test(
    config: CacheConfig, dims: int, dtype: mx.Dtype, make: Factory, tiled: bool, case: Case
) -> Outcome:
    from mlxkv.attention import DECODE_TOKENS, _whole, attend
    from mlxkv.cache import View
    from mlxkv.sealed import Codes, Records
    from mlxkv.segments import Parts

    def seal(store):
        store.append(pair, 1)  # as decoding does, which has a kernel of its own for matrices
        store.append(pair, PAGES - 1, config.page)
        return store

    def outputs(store):
        runs = [store.read(0, PAGES)]
        if config.follows:  # and two, as two bases make them
            halves = store.read(0, PAGES // 2), store.read(PAGES // 2, PAGES)
            runs.append(Parts(halves))
        views = [View(live, sink, pages) for pages in runs]
        seen = [
            attend(queries[:, :, :n], view, dims**-0.5, None if n == 1 else "causal", logits)
            for n in steps
            for view in views
        ]
        many = attend(queries, views[0], dims**-0.5, "causal", logits)
        out = mx.concatenate(seen, axis=2), *_whole(views[-1], dtype), many
        mx.eval(out)
        return out

    layout = kernels.record_layout(config, *config.dims(dims, dims))
    steps = case.steps(max(dims, layout.keys.dims, layout.values.dims), make)
    # Plain ops on the CPU are the judge: on some GPUs a few of MLX's quantized products are missing.
    with mx.stream(mx.cpu):
        count = max(case.heads, case.kv_heads)
        x = mx.random.normal((5, 1, count, PAGES * config.page, dims), key=mx.random.key(0))
        keys, values, queries, *ends = x.astype(dtype)
        pair = keys[:, : case.kv_heads], values[:, : case.kv_heads]
        live = tuple(mx.contiguous(y[:, : case.kv_heads, : DECODE_TOKENS + 1]) for y in ends)
        sink = tuple(mx.contiguous(y[:, : case.kv_heads, 16:20]) for y in ends)
        queries = queries[:, : case.heads, : DECODE_TOKENS + 1]
        logits = mx.linspace(-1, 1, case.heads).astype(dtype) if case.sinks else None
        mx.eval(pair, live, sink, queries)
        turned = None
        if config.calibrated:
            turned = sample(case.kv_heads, (dims, dims), config.fitted)
        plain = seal(Codes(config, (dims, dims), turned))
        mx.eval(plain.arrays())
    start = time.perf_counter()
    try:
        with encoding.using(encoding.KERNEL):  # whatever is asked for: the kernel is on trial
            ours = seal(Records(config, (dims, dims), make, tiled, turned))
        found = outputs(ours)
        seconds = time.perf_counter() - start
        with mx.stream(mx.cpu):
            same = Codes(config, (dims, dims), turned)
            same.restore(ours.state, PAGES)
            expected = outputs(same)
            whole = View(live, sink, None)
            stored = [_whole(replace(whole, pages=x.read(0, PAGES)), dtype) for x in (same, plain)]
            mx.eval(stored)
    except Exception as error:  # a compiler or a driver may raise anything at all
        tiles.forget_counters()
        spent = time.perf_counter() - start
        drain()
        built = not faults.is_of_build(error)
        return Outcome({}, 0.0, faults.reason(error), built, spent, faults.text(error))
    names = ("attend", "keys", "values", "prefill")
    errors = {name: _off(*two) for name, *two in zip(names, found, expected, strict=True)}
    sides = list(zip(*stored, strict=True))
    errors["seal"] = max(_off(*two) for two in sides)
    ties = sum(_far(*two) for two in sides) / 2
    bounds = dict.fromkeys(errors, BOUND) | {"prefill": PREFILL_BOUND}
    if any(
        side.calibrated
        or side.transform == "random"
        # The seal kernel has butterflies for these; where others seal, the rotation is a product.
        or (side.transform != "none" and not ours.layout.sealed_by_kernel)
        for side in (config.keys, config.values)
    ):
        bounds["seal"] = SEAL_BOUND
    if getattr(config.keys.quantizer, "residual", False):
        bounds["seal"] = SIGN_BOUND
    wrong = next((name for name, off in errors.items() if not off <= bounds[name]), None)
    reason = None if wrong is None else f"{wrong} is off by {errors[wrong]:.2g}"
    return Outcome(errors, ties, reason, True, seconds)


def drain(*streams: mx.Stream) -> None:
    """Wait for what is under way on the default stream and on `streams`, whatever comes of it. After an
    error of the GPU buffers in flight set the error again, and the next thing computed would raise it."""
    for stream in (*streams, mx.default_stream(mx.default_device())):
        for _ in range(2):  # the first may raise before it has waited
            with suppress(RuntimeError):
                mx.synchronize(stream)


def _off(ours: mx.array, plain: mx.array) -> float:
    ours, plain = ours.astype(mx.float32), plain.astype(mx.float32)
    return mx.sqrt(mx.mean((ours - plain) ** 2) / mx.mean(plain**2)).item()


def _far(ours: mx.array, plain: mx.array) -> float:
    """The share of values that differ by more than rounding."""
    ours, plain = ours.astype(mx.float32), plain.astype(mx.float32)
    far = mx.abs(ours - plain) > 0.05 * mx.sqrt(mx.mean(plain**2))
    return mx.mean(far.astype(mx.float32)).item()
