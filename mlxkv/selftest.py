"""Kernels prove themselves on this machine before they are used, which also warms them up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from mlxkv import encoding
from mlxkv.calibrated import sample
from mlxkv.config import CacheConfig
from mlxkv.metal.launch import Factory

BOUND = 0.01  # rms against plain ops; 16-bit outputs and TF32 products stay below half of it
# The same of what was encoded behind a product with a rotation. A code that falls to the other side
# of a tie is off by a step, and a product whose factors are rounded (TF32) brings some to ties.
SEAL_BOUND = 0.06
SIGN_BOUND = 2 * SEAL_BOUND  # a code that falls to the other side changes what signs are taken of
HEADS, KV_HEADS = 8, 2
PAGES = 16  # enough for several splits to be merged


@dataclass(frozen=True)
class Outcome:
    """What a test of kernels found. errors: rms against plain ops of attend, keys and values (all
    three on the codes of the kernels) and of seal; ties: share of values whose code fell to the other
    side. reason: why they are not used, or None."""

    errors: dict[str, float]
    ties: float
    reason: str | None


def fault(
    config: CacheConfig, dims: int, dtype: mx.Dtype, make: Factory, tiled: bool = False
) -> str | None:
    """What is wrong with the kernels of this format for heads of `dims`, or None."""
    return test(config, dims, dtype, make, tiled).reason


@cache
def test(
    config: CacheConfig, dims: int, dtype: mx.Dtype, make: Factory, tiled: bool = False
) -> Outcome:
    """Seal pages both ways and compare; then attend to those of the kernels both ways.

    Whatever the kernels raise is a reason, never an error.
    """
    from mlxkv.attention import _whole, attend
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
        views = [View(window, None, pages) for pages in runs]
        seen = mx.concatenate([attend(queries, view, dims**-0.5) for view in views])
        out = seen, *_whole(views[-1], dtype)
        mx.eval(out)
        return out

    # Plain ops on the CPU are the judge: on some GPUs a few of MLX's quantized products are missing.
    with mx.stream(mx.cpu):
        x = mx.random.normal((5, 1, HEADS, PAGES * config.page, dims), key=mx.random.key(0))
        keys, values, queries, *live = x.astype(dtype)
        pair = keys[:, :KV_HEADS], values[:, :KV_HEADS]
        window = tuple(y[:, :KV_HEADS, :5] for y in live)
        queries = queries[:, :, :1]
        mx.eval(pair, window, queries)
        turned = None
        if config.calibrated:
            turned = sample(KV_HEADS, (dims, dims), config.fitted)
        plain = seal(Codes(config, (dims, dims), turned))
        mx.eval(plain.arrays())
    try:
        with encoding.using(encoding.KERNEL):  # whatever is asked for: the kernel is on trial
            ours = seal(Records(config, (dims, dims), make, tiled, turned))
        found = outputs(ours)
        with mx.stream(mx.cpu):
            same = Codes(config, (dims, dims), turned)
            same.restore(ours.state, PAGES)
            expected = outputs(same)
            stored = [_whole(View(window, None, x.read(0, PAGES)), dtype) for x in (same, plain)]
            mx.eval(stored)
    except Exception as error:  # a compiler or a driver may raise anything at all
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        return Outcome({}, 0.0, reason)
    names = ("attend", "keys", "values")
    errors = {name: _off(*two) for name, *two in zip(names, found, expected, strict=True)}
    sides = list(zip(*stored, strict=True))
    errors["seal"] = max(_off(*two) for two in sides)
    ties = sum(_far(*two) for two in sides) / 2
    bounds = dict.fromkeys(errors, BOUND)
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
    return Outcome(errors, ties, reason)


def _off(ours: mx.array, plain: mx.array) -> float:
    ours, plain = ours.astype(mx.float32), plain.astype(mx.float32)
    return mx.sqrt(mx.mean((ours - plain) ** 2) / mx.mean(plain**2)).item()


def _far(ours: mx.array, plain: mx.array) -> float:
    """The share of values that differ by more than rounding."""
    ours, plain = ours.astype(mx.float32), plain.astype(mx.float32)
    far = mx.abs(ours - plain) > 0.05 * mx.sqrt(mx.mean(plain**2))
    return mx.mean(far.astype(mx.float32)).item()
