"""Encode new keys or values into pages of a pool, in Triton: rotation, clip, group scales, codes, packing.

The rotation is a dense product on matrix units. Inputs of 16 bits are exact in it: the matrix is cut
into three parts of 16 bits whose sum is the float32 one, and products are summed in float32. Inputs
of 32 bits are multiplied in float32.
"""

# Kernels are in Triton's language, which its stubs do not make Python: constants are not numbers, loops no iterables.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false, reportRedeclaration=false

from __future__ import annotations

import triton
import triton.language as tl

from cuda_track.kernels.codes import at_record

HALF_MAX = tl.constexpr(65504.0)
# Added to a small float32 it leaves the nearest integer, half to even, in the lowest bits.
ROUNDS = tl.constexpr(12582912.0)


@triton.jit
def _transformed(
    rows, down, D: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """x @ down: float32 [T, R]. rows: pointers to the rows of x; down: to [PARTS or 1, D, R]."""
    r = tl.arange(0, R)
    y = tl.zeros([rows.shape[0], R], tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        part = tl.load(rows[:, None] + d[None, :])
        at = down + d[:, None] * R + r[None, :]
        if PARTS == 0:
            y = tl.dot(part.to(tl.float32), tl.load(at), y, input_precision="ieee")
        else:  # the smallest part first
            for i in tl.static_range(PARTS):
                y = tl.dot(part, tl.load(at + (PARTS - 1 - i) * D * R), y)
    return y


@triton.jit
def _clipped(y, RANK: tl.constexpr):
    """Clip each row of y [T, R] to its RANK-th largest absolute value, found bit by bit: non-negative floats are
    ordered as their bits."""
    size = tl.abs(y).to(tl.int32, bitcast=True)
    limit = tl.zeros([y.shape[0]], tl.int32)
    for i in range(31):
        candidate = limit | (1 << (30 - i))
        count = tl.sum((size >= candidate[:, None]).to(tl.int32), 1)
        limit = tl.where(count >= RANK, candidate, limit)
    limits = limit.to(tl.float32, bitcast=True)[:, None]
    return tl.minimum(tl.maximum(y, -limits), limits)


@triton.jit
def _half(x, LIMIT: tl.constexpr):
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT).to(tl.float16)


@triton.jit
def _over(x, divisor: tl.constexpr, FUSED: tl.constexpr):
    """x / whole, rounded as IEEE says; values that `_half` clips may be smaller. FUSED: by two fused
    multiply-adds, exact for every float32 and whole = 2^b - 1 (all mantissas tried), since division is a
    subroutine on the GPU."""
    if FUSED:
        x = tl.minimum(x, HALF_MAX * divisor)  # infinity would leave NaN as the rest
        inverse = tl.full(x.shape, 1.0 / divisor, tl.float32)
        quotient = x * inverse
        remainder = tl.fma(quotient, tl.full(x.shape, -divisor, tl.float32), x)
        return tl.fma(remainder, inverse, quotient)
    return tl.div_rn(x, tl.zeros_like(x) + divisor)


@triton.jit
def _coded(y, axis: tl.constexpr, BITS: tl.constexpr, SYMMETRIC: tl.constexpr, FUSED: tl.constexpr):
    """(codes of y, which shares scales along `axis`; scales and biases in packed pairs)."""
    top: tl.constexpr = 2**BITS - 1
    middle: tl.constexpr = 2 ** (BITS - 1)
    if SYMMETRIC:
        largest = tl.max(tl.abs(y), axis)
        scale = _half(_over(largest, middle - 1, FUSED), HALF_MAX / middle)
        bias = (scale.to(tl.float32) * -middle).to(tl.float16)
        low: tl.constexpr = 1
    else:
        bias = _half(tl.min(y, axis), HALF_MAX)
        width = tl.max(y, axis) - bias.to(tl.float32)
        scale = _half(_over(width, top, FUSED), HALF_MAX)
        low: tl.constexpr = 0
    step = scale.to(tl.float32)
    # One division per group: a code at a boundary may round to the other side.
    inverse = 1.0 / tl.where(step > 0, step, 1.0)
    code = (y - tl.expand_dims(bias.to(tl.float32), axis)) * tl.expand_dims(inverse, axis)
    code = tl.minimum(tl.maximum(code, low), top) + ROUNDS
    code = code.to(tl.int32, bitcast=True) & top
    if SYMMETRIC:
        code = tl.where(tl.expand_dims(step, axis) > 0, code, middle)
    pair = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return code, pair | (bias.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit(do_not_specialize=["pages"])
def quantize_kernel(
    x, down, words, high, numbers, places,  # places: [B, pages] int64, in the pool
    x_row, x_head, down_head, pages, record,
    D: tl.constexpr, R: tl.constexpr, T: tl.constexpr, PAGE: tl.constexpr,
    BITS: tl.constexpr, PLANES: tl.constexpr, GROUPS: tl.constexpr,
    CHANNEL: tl.constexpr, SYMMETRIC: tl.constexpr, RANK: tl.constexpr, KEYS: tl.constexpr,
    TURNED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Grid (tokens / T, G, B). x: [B, G, tokens, D]; row and head: its strides. CHANNEL: tokens that
    share a scale per channel, T or 0: scales are per token."""
    block, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t, first = tl.arange(0, T), block * T
    source = x + b.to(tl.int64) * x_row + g * x_head + first.to(tl.int64) * D
    place = tl.load(places + b * pages + (first + t) // PAGE) * tl.num_programs(1) + g  # [T]
    of_channels = tl.load(places + b * pages + first // PAGE) * tl.num_programs(1) + g
    quantize_rows(
        source + t * D, down + g * down_head, words, high, numbers,
        place, (first + t) % PAGE, of_channels, first % PAGE, record,
        D, R, PAGE, BITS, PLANES, GROUPS, CHANNEL, SYMMETRIC, RANK, KEYS, TURNED, PARTS, BLOCK, FUSED,
    )  # fmt: skip


@triton.jit
def quantize_rows(
    rows, down, words, high, numbers, place, inside, of_channels, first_inside, record,
    D: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr,
    GROUPS: tl.constexpr, CHANNEL: tl.constexpr, SYMMETRIC: tl.constexpr, RANK: tl.constexpr,
    KEYS: tl.constexpr, TURNED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Quantize T tokens. rows: pointers to them [T]. place, inside: their records, and their places in a page [T].
    of_channels, first_inside: the same of the first, which scales per channel lie by."""
    T: tl.constexpr = rows.shape[0]
    J: tl.constexpr = R // PLANES
    r, j = tl.arange(0, R), tl.arange(0, J)
    group = tl.arange(0, GROUPS)
    if TURNED:
        y = _transformed(rows, down, D, R, PARTS, BLOCK)
    else:
        y = tl.load(rows[:, None] + r[None, :]).to(tl.float32)
    if RANK > 1:
        y = _clipped(y, RANK)
    if CHANNEL:
        code, pair = _coded(y, 0, BITS, SYMMETRIC, FUSED)
    else:
        y = tl.reshape(y, [T, GROUPS, R // GROUPS])
        code, pair = _coded(y, 2, BITS, SYMMETRIC, FUSED)
    code = tl.reshape(code, [T, PLANES, J])

    at = inside[:, None] * J + j[None, :] if KEYS else inside[:, None] + j[None, :] * PAGE
    plane = tl.arange(0, PLANES)[None, :, None]
    if BITS == 3:
        _store(at_record(words, place[:, None], record) + at, tl.sum((code & 3) << (plane * 2), 1))
        _store(at_record(high, place[:, None], record) + at, tl.sum((code >> 2) << plane, 1))
    else:
        _store(at_record(words, place[:, None], record) + at, tl.sum(code << (plane * BITS), 1))
    if CHANNEL:
        at = first_inside // CHANNEL * R + r
        tl.store(at_record(numbers, of_channels, record) + at, pair)
    else:
        at = inside[:, None] + group[None, :] * PAGE
        tl.store(at_record(numbers, place[:, None], record) + at, pair)


@triton.jit
def _store(at, words):
    """Store the low bits of int32 words."""
    tl.store(at, words.to(at.dtype.element_ty))
