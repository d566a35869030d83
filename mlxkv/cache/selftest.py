"""Test kernels on this machine before they are used, which also builds them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import cast

import mlx.core as mx

from mlxkv import errors
from mlxkv.cache.attention import DECODE_TOKENS, attend, decode_all
from mlxkv.cache.backends import PLAIN_OPS, Backend, LatentBackend, PortableBackend
from mlxkv.cache.stores import Codes, LatentCodes, Records
from mlxkv.cache.view import Parts, View, both
from mlxkv.codec.maps import sample
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.quantizers import DIMS, MOST_BLOCKS, MixedBits
from mlxkv.formats.records import RecordLayout, record_layout
from mlxkv.metal import attend as kernels
from mlxkv.metal import tiles, trust

BOUND = 0.01  # rms against plain ops; 16-bit outputs and TF32 products stay below half of it
# Bound for values encoded after a product with a rotation. A code on the other side of a tie is off by a step, and a
# product with rounded factors (TF32) causes some ties.
QUANTIZE_BOUND = 0.06
# A prefill is MLX's attention in the model's type, with keys and values rounded to it.
PREFILL_BOUND = 0.02
PAGES = 16  # enough for several splits to be merged
# Block widths to test mixed bits with, for any number of blocks: all widths, in different orders.
TRIED = ((8, 3, 1, 4, 3, 2, 1), (4, 3, 2, 1, 3, 2, 1))
MOST_HEADS = 2  # kv heads of a trial; kernels are built by query heads per kv head


@dataclass(frozen=True)
class AttentionShape:
    """The part of a model's attention that kernels are built for. sinks: whether there are logits of
    attention sinks. softcap: of scores."""

    heads: int = 8
    kv_heads: int = 2
    sinks: bool = False
    softcap: float | None = None

    @property
    def small(self) -> AttentionShape:
        """Return the shape with at most MOST_HEADS kv heads."""
        kv_heads = min(MOST_HEADS, self.kv_heads)
        return replace(
            self, heads=max(1, self.heads // self.kv_heads) * kv_heads, kv_heads=kv_heads
        )

    def steps(self, layout: RecordLayout, dims: int) -> list[int]:
        """Return the numbers of new tokens to test, up to `kernels.MOST_NEW`.

        One per number of query rows that the portable kernel is built for, and one where tiles follow it.
        dims: head dim D.
        """
        rows = self.heads // self.kv_heads
        tiles_ = {}
        for new in range(1, kernels.MOST_NEW + 1):
            by_tiles = rows * new > kernels.MOST_ROWS  # in `RowsBackend`
            tiles_.setdefault((by_tiles, kernels.tile_of(layout, dims, rows * new)), new)
        return list(tiles_.values())


DEFAULT_SHAPE = AttentionShape()
LATENT_SHAPE = AttentionShape(16, 1)  # where a model's heads are not known


@dataclass(frozen=True)
class TrialResult:
    """The result of a test of kernels.

    errors: rms against plain ops of attend, keys, values and prefill (all on the codes of the kernels)
    and of quantized pages. ties: share of values whose code is on the other side of a tie. reason: why they are
    not used, in a line, or None. detail: the whole message of a compiler or driver. built: whether they
    compiled. seconds: to build them and to run them once."""

    errors: dict[str, float]
    ties: float
    reason: str | None
    built: bool = True
    seconds: float = 0.0
    detail: str = ""


_results: dict[tuple, dict[AttentionShape, TrialResult]] = {}


def representative_config(config: CacheConfig, dims: int) -> CacheConfig:
    """Return the config to test in place of this one: itself, except for mixed bits.

    Their kernels are the same for all widths (`metal.template`). Keys are tested with fewer stored dims than head dims.
    """
    sides = {}
    for name, pattern, fewer in (("keys", TRIED[0], 1), ("values", TRIED[1], 0)):
        side = getattr(config, name)
        if not side.mixed_bits:
            return config
        count = min(MOST_BLOCKS, max(1, dims // DIMS - fewer))
        widths = sorted((pattern * (count // len(pattern) + 1))[:count], reverse=True)
        sides[name] = replace(side, quantizer=MixedBits(1.0, tuple(widths)))
    return replace(config, **sides)


def why_not(
    config: CacheConfig,
    dims: int,
    dtype: mx.Dtype,
    backend: Backend,
    shape: AttentionShape | None = None,
) -> str | None:
    """Return why `backend` must not be used, or None, by notes of earlier processes on a Mac, or by `test`."""
    noted = None
    if backend.kernel_builder is mx.fast.metal_kernel:
        noted = trust.why_not(_noted_as(representative_config(config, dims), dims, dtype, backend))
    return noted or test(config, dims, dtype, backend, shape).reason


def test(
    config: CacheConfig,
    dims: int,
    dtype: mx.Dtype,
    backend: Backend,
    shape: AttentionShape | None = None,
) -> TrialResult:
    """Quantize pages by kernels and by plain ops and compare; then attend to the kernels' pages both ways. Latents
    are attended to both ways. Once in a process. shape: None takes the worst known result of any shape.

    An exception of the kernels becomes the reason, never an error.
    """
    config = representative_config(config, dims)
    results = _results.setdefault((config, dims, dtype, backend), {})
    if shape is None and results:
        return next(
            (result for result in results.values() if result.reason),
            next(iter(results.values())),
        )
    is_latent = isinstance(backend, LatentBackend)
    shape = (shape or (LATENT_SHAPE if is_latent else DEFAULT_SHAPE)).small
    if shape not in results:
        prepare = _latent_trial if is_latent else _page_trial
        on_trial, on_mac = nullcontext(), backend.kernel_builder is mx.fast.metal_kernel
        kernels = _noted_as(config, dims, dtype, backend)
        if on_mac:
            on_trial = trust.trial(kernels)
        with on_trial:
            tested = _tried(*prepare(config, dims, dtype, backend, shape))
        if on_mac and not (tested.reason and errors.is_of_memory(RuntimeError(tested.detail))):
            trust.note(kernels, tested.reason)
        results[shape] = tested
    return results[shape]


def _noted_as(config: CacheConfig, dims: int, dtype: mx.Dtype, backend: Backend) -> trust.Kernels:
    """Return the key of these kernels in notes on a Mac."""
    layout: object = config
    if not isinstance(backend, LatentBackend):
        layout = record_layout(config, *config.dims(dims, dims))
    return layout, dims, dtype, backend.name


Outputs = tuple[mx.array, ...]


def _tried(
    run: Callable[[], Outputs], judge: Callable[[Outputs, float], TrialResult]
) -> TrialResult:
    """Return the result of `judge` for the outputs and seconds of `run`, or why `run` failed."""
    start = time.perf_counter()
    try:
        outputs = run()
        return judge(outputs, time.perf_counter() - start)
    except Exception as error:  # a compiler or a driver may raise anything at all
        tiles.forget_counters()
        elapsed = time.perf_counter() - start
        drain()
        built = not errors.is_of_build(error)
        return TrialResult({}, 0.0, errors.reason(error), built, elapsed, errors.text(error))


def _page_trial(
    config: CacheConfig,
    dims: int,
    dtype: mx.Dtype,
    backend: Backend,
    shape: AttentionShape,
) -> tuple[Callable[[], Outputs], Callable[[Outputs, float], TrialResult]]:
    """Return functions that run these kernels over page records, and judge the outputs."""
    assert isinstance(backend, PortableBackend)

    def quantize(store):
        store.append(pair, 1)  # as decoding does, which has a kernel of its own for matrices
        store.append(pair, PAGES - 1, config.page)
        return store

    def outputs(store) -> Outputs:
        runs = [store.read(0, PAGES)]
        if config.is_online:  # and two, as two bases make them
            halves = store.read(0, PAGES // 2), store.read(PAGES // 2, PAGES)
            runs.append(Parts(halves))
        views = [View(recent, sink, pages) for pages in runs]
        steps_out = [
            attend(
                *(queries[:, :, :n], view, dims**-0.5, None if n == 1 else "causal", logits),
                softcap=shape.softcap,
            )
            for n in steps
            for view in views
        ]
        prefill = attend(queries, views[0], dims**-0.5, "causal", logits, shape.softcap)
        out = mx.concatenate(steps_out, axis=2), *decode_all(views[-1], dtype), prefill
        mx.eval(out)
        return out

    layout = record_layout(config, *config.dims(dims, dims))
    steps = shape.steps(layout, dims)
    # Plain ops on the CPU are the reference: some GPUs lack a few of MLX's quantized products.
    with mx.stream(mx.cpu):
        count = max(shape.heads, shape.kv_heads)
        x = mx.random.normal((5, 1, count, PAGES * config.page, dims), key=mx.random.key(0))
        keys, values, queries, ends_keys, ends_values = x.astype(dtype)
        pair = keys[:, : shape.kv_heads], values[:, : shape.kv_heads]
        ends = ends_keys, ends_values
        recent = both(lambda y: mx.contiguous(y[:, : shape.kv_heads, : DECODE_TOKENS + 1]), ends)
        sink = both(lambda y: mx.contiguous(y[:, : shape.kv_heads, 16:20]), ends)
        queries = queries[:, : shape.heads, : DECODE_TOKENS + 1]
        logits = mx.linspace(-1, 1, shape.heads).astype(dtype) if shape.sinks else None
        mx.eval(pair, recent, sink, queries)
        layer_maps = None
        if config.calibrated:
            layer_maps = sample(shape.kv_heads, (dims, dims), config.fitted)
        plain = quantize(Codes(config, (dims, dims), layer_maps))
        mx.eval(plain.arrays())
    by_kernels = Records(config, (dims, dims), backend, layer_maps)

    def judge(results: Outputs, seconds: float) -> TrialResult:
        with mx.stream(mx.cpu):
            reference = Codes(config, (dims, dims), layer_maps)
            reference.restore(by_kernels.state, PAGES)
            expected = outputs(reference)
            windows = View(recent, sink, None)
            stored = [
                decode_all(replace(windows, pages=x.read(0, PAGES)), dtype)
                for x in (reference, plain)
            ]
            mx.eval(stored)
        pairs = zip(("attend", "keys", "values", "prefill"), results, expected, strict=True)
        rms = {name: relative_rms(*two) for name, *two in pairs}
        sides = list(zip(*stored, strict=True))
        rms["seal"] = max(relative_rms(*two) for two in sides)
        ties = sum(_share_off(*two) for two in sides) / 2
        bounds = dict.fromkeys(rms, BOUND) | {"prefill": PREFILL_BOUND}
        if any(
            side.calibrated
            or side.transform == "random"
            # The quantize kernel has butterflies for these; where others quantize, the rotation is a product.
            or (side.transform != "none" and not layout.quantized_by_kernel)
            for side in (config.keys, config.values)
        ):
            bounds["seal"] = QUANTIZE_BOUND
        wrong = next((name for name, off in rms.items() if not off <= bounds[name]), None)
        reason = None if wrong is None else f"{wrong} is off by {rms[wrong]:.2g}"
        return TrialResult(rms, ties, reason, True, seconds)

    return lambda: outputs(quantize(by_kernels)), judge


def _latent_trial(
    config: CacheConfig, dims: int, dtype: mx.Dtype, backend: Backend, shape: AttentionShape
) -> tuple[Callable[[], Outputs], Callable[[Outputs, float], TrialResult]]:
    """Return functions that run the kernel over latents of `dims` dims, and judge the output."""
    heads, count = shape.heads, PAGES * config.page
    # Plain ops on the CPU are the reference: some GPUs lack a few of MLX's quantized products.
    with mx.stream(mx.cpu):
        x = mx.random.normal((1, 1, count, dims), key=mx.random.key(0)).astype(dtype)
        recent, sink = x[:, :, 5:30], x[:, :, 40:44]
        queries = mx.random.normal((1, heads, 1, dims), key=mx.random.key(1)).astype(dtype)
        added = mx.random.normal((1, heads, 1, count + 29), key=mx.random.key(2)).astype(dtype)
        layer_maps = sample(1, (dims, dims), config.fitted) if config.calibrated else None
        store = LatentCodes(config, (dims, dims), layer_maps, backend)
        store.append((x, x), PAGES)
        pages = store.read(0, PAGES)
        recent, sink = mx.contiguous(recent), mx.contiguous(sink)
        view = View((recent, recent), (sink, sink), pages)
        plain = replace(view, pages=replace(pages, backend=PLAIN_OPS))
        expected = attend(queries, plain, dims**-0.5, added).astype(mx.float32)
        mx.eval(expected, view.recent, view.sink, store.arrays(), queries, added)

    def run() -> Outputs:
        out = attend(queries, view, dims**-0.5, added).astype(mx.float32)
        mx.eval(out)
        return (out,)

    def judge(results: Outputs, seconds: float) -> TrialResult:
        with mx.stream(mx.cpu):
            off = relative_rms(results[0], expected)
        reason = None if off <= BOUND else f"attention over latents is off by {off:.2g}"
        return TrialResult({"attend": off}, 0.0, reason, True, seconds)

    return run, judge


def drain(*streams: mx.Stream | mx.ThreadLocalStream) -> None:
    """Wait for all work on the default stream and on `streams`, and ignore its errors. After an error of
    the GPU, buffers in flight set the error again, and the next computation would raise it."""
    for stream in (*streams, mx.default_stream(mx.default_device())):
        for _ in range(2):  # the first may raise before it has waited
            with suppress(RuntimeError):
                mx.synchronize(stream)


def relative_rms(result: mx.array, expected: mx.array) -> float:
    """rms(result - expected) / rms(expected), in float32."""
    result, expected = result.astype(mx.float32), expected.astype(mx.float32)
    off = mx.sqrt(mx.mean((result - expected) ** 2) / mx.mean(expected**2))
    return cast("float", off.item())


def _share_off(result: mx.array, plain: mx.array) -> float:
    """Return the share of values that differ by more than rounding."""
    result, plain = result.astype(mx.float32), plain.astype(mx.float32)
    off = mx.abs(result - plain) > 0.05 * mx.sqrt(mx.mean(plain**2))
    return cast("float", mx.mean(off.astype(mx.float32)).item())
