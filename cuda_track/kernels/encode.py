"""Encode new keys or values into pages of a pool, in Triton: rotation, clip, group scales, codes, packing; levels of a
codebook in place of scales, or keys as radius and angle.

The rotation is a dense product on matrix units. Inputs of 16 bits are exact in it: the matrix is cut
into three parts of 16 bits whose sum is the float32 one, and products are summed in float32. Inputs
of 32 bits are multiplied in float32.
"""

# Kernels are in Triton's language, which its stubs do not make Python: constants are not numbers, loops no iterables.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportAssignmentType=false, reportRedeclaration=false

from __future__ import annotations

import triton
import triton.language as tl

from cuda_track.kernels import interpreted
from cuda_track.kernels.codes import at_record, boundary

HALF_MAX = tl.constexpr(65504.0)
# Added to a small float32 it leaves the nearest integer, half to even, in the lowest bits.
ROUNDS = tl.constexpr(12582912.0)
INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def _above(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _below(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(x, axis: tl.constexpr):
    """Return the largest along an axis. NaN stays NaN."""
    # The interpreter reduces element by element what is not `tl.max`, and that leaves NaN out.
    if INTERPRETED:
        numbers = tl.where(x == x, x, -float("inf"))
        return tl.max(numbers, axis) + tl.sum(tl.where(x == x, 0.0, x), axis)
    return tl.reduce(x, axis, _above)


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
    return _below(_above(y, -limits), limits)


@triton.jit
def _half(x, LIMIT: tl.constexpr):
    """Return x as float16, no larger than LIMIT. NaN stays NaN."""
    return _below(_above(x, -LIMIT), LIMIT).to(tl.float16)


@triton.jit
def _pair(low, high):
    """Two float16 in an int32."""
    return (
        low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        | high.to(tl.int16, bitcast=True).to(tl.int32) << 16
    )


@triton.jit
def _over(x, divisor: tl.constexpr, FUSED: tl.constexpr):
    """x / whole, rounded as IEEE says; values that `_half` clips may be smaller. FUSED: by two fused
    multiply-adds, exact for every float32 and whole = 2^b - 1 (all mantissas tried), since division is a
    subroutine on the GPU."""
    if FUSED:
        x = _below(x, HALF_MAX * divisor)  # infinity would leave NaN as the rest
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
        largest = _largest(tl.abs(y), axis)
        scale = _half(_over(largest, middle - 1, FUSED), HALF_MAX / middle)
        bias = (scale.to(tl.float32) * -middle).to(tl.float16)
        low: tl.constexpr = 1
    else:
        bias = _half(-_largest(-y, axis), HALF_MAX)
        width = _largest(y, axis) - bias.to(tl.float32)
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
    return code, _pair(scale, bias)


@triton.jit
def _leveled(y, R: tl.constexpr, BITS: tl.constexpr):
    """(codes of y [T, R] in the order of a pool; norms [T, 1] in packed pairs). TurboQuant, alg. 1: of equal distance
    the level nearer to 0 (`mlxkv.spec.codebook`)."""
    middle: tl.constexpr = 2 ** (BITS - 1)
    norm = tl.sqrt_rn(tl.sum(y * y, 1))[:, None]
    size, code = tl.abs(y), tl.where(y > 0, middle, 0)
    for i in tl.static_range(middle, 2 * middle - 1):
        code += (size > boundary(R, BITS, i) * norm).to(tl.int32)
    scale = _half(norm, HALF_MAX)
    return code, _pair(scale, tl.zeros_like(scale))


@triton.jit(do_not_specialize=["pages"])
def quantize_kernel(
    x, down, words, high, numbers, places,  # places: [B, pages] int64, in the pool
    x_row, x_head, down_head, pages, record,
    D: tl.constexpr, R: tl.constexpr, T: tl.constexpr, PAGE: tl.constexpr,
    BITS: tl.constexpr, PLANES: tl.constexpr, GROUPS: tl.constexpr,
    CHANNEL: tl.constexpr, SYMMETRIC: tl.constexpr, RANK: tl.constexpr, KEYS: tl.constexpr,
    TURNED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, FUSED: tl.constexpr,
    KIND: tl.constexpr,
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
        D, R, PAGE, BITS, PLANES, GROUPS, CHANNEL, SYMMETRIC, RANK, KEYS, TURNED, PARTS, BLOCK, FUSED, KIND,
    )  # fmt: skip


@triton.jit
def quantize_rows(
    rows, down, words, high, numbers, place, inside, of_channels, first_inside, record,
    D: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr,
    GROUPS: tl.constexpr, CHANNEL: tl.constexpr, SYMMETRIC: tl.constexpr, RANK: tl.constexpr,
    KEYS: tl.constexpr, TURNED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, FUSED: tl.constexpr,
    KIND: tl.constexpr,
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
    if KIND == "codebook":
        code, pair = _leveled(y, R, BITS)
    elif CHANNEL:
        code, pair = _coded(y, 0, BITS, SYMMETRIC, FUSED)
    else:
        y = tl.reshape(y, [T, GROUPS, R // GROUPS])
        code, pair = _coded(y, 2, BITS, SYMMETRIC, FUSED)
    code = tl.reshape(code, [T, PLANES, J])

    at = inside[:, None] * J + j[None, :] if KEYS else inside[:, None] + j[None, :] * PAGE
    low, top = _packed(code, 0, BITS)
    _store(at_record(words, place[:, None], record) + at, low)
    if BITS == 3:
        _store(at_record(high, place[:, None], record) + at, top)
    if CHANNEL:
        at = first_inside // CHANNEL * R + r
        tl.store(at_record(numbers, of_channels, record) + at, pair)
    else:
        at = inside[:, None] + group[None, :] * PAGE
        tl.store(at_record(numbers, place[:, None], record) + at, pair)


@triton.jit
def _packed(code, first: tl.constexpr, BITS: tl.constexpr):
    """Return the words [T, J] of codes [T, planes, J] of planes from `first` on, and those of third bits."""
    plane = first + tl.arange(0, code.shape[1])[None, :, None]
    if BITS == 3:
        words, third = tl.sum((code & 3) << (plane * 2), 1), tl.sum((code >> 2) << plane, 1)
    else:
        words = tl.sum(code << (plane * BITS), 1)
        third = words  # unused
    return words, third


@triton.jit
def _store(at, words):
    """Store the low bits of int32 words."""
    tl.store(at, words.to(at.dtype.element_ty))


# -- Keys as radius and angle (Wu, 2502.00527; `mlxkv.spec.polar`).

PI = tl.constexpr(3.14159265358979)


@triton.jit
def _angle(a, b):
    """Return the angle of (a, b) in [0, 2 pi), of (0, 0) 0: float32, within 2e-7 of itself. Cephes' polynomial of atanf
    takes tangents up to .4142: larger ones are turned back by pi / 4."""
    large, small = _above(tl.abs(a), tl.abs(b)), _below(tl.abs(a), tl.abs(b))
    turned = small > 0.41421356 * large
    above, below = tl.where(turned, small - large, small), tl.where(turned, small + large, large)
    x = tl.div_rn(above, tl.where(below > 0, below, 1.0))
    z = x * x
    y = ((8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1) * z - 3.33329491539e-1
    y = y * z * x + x
    y = tl.where(turned, y + PI / 4, y)
    y = tl.where(tl.abs(b) > tl.abs(a), PI / 2 - y, y)
    y = tl.where(a < 0, PI - y, y)
    return tl.where(b < 0, 2 * PI - y, y)


@triton.jit
def _steps(x, BITS: tl.constexpr):
    """(codes of x [T, n], 2^BITS steps between the smallest and the largest of its tokens; steps and lows in packed
    pairs [n])."""
    low = _half(-_largest(-x, 0), HALF_MAX)
    width = _above(_largest(x, 0) - low.to(tl.float32), 0.0)
    step = _half(width * (1 / 2**BITS), HALF_MAX)
    size = step.to(tl.float32)
    size = tl.where(size > 0, size, 1.0)[None, :] + tl.zeros_like(x)
    code = tl.floor(tl.div_rn(x - low.to(tl.float32)[None, :], size))
    return tl.minimum(tl.maximum(code, 0.0), 2**BITS - 1.0).to(tl.int32), _pair(step, low)


@triton.jit(do_not_specialize=["pages"])
def quantize_polar_kernel(
    x, words, high, numbers, places,  # x: [B, G, tokens, R]; places: [B, pages] int64, in the pool
    x_row, x_head, pages, record,
    R: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr,
    RADIUS: tl.constexpr, ANGLE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Grid (pages, G R / 2 / PAIRS, B): PAIRS pairs of the keys of a page, which words of their own hold. Row and head:
    strides of x. RADIUS, ANGLE: bits, of which BITS are the more."""
    HALF: tl.constexpr = PLANES // 2
    J: tl.constexpr = R // PLANES
    OWN: tl.constexpr = PAIRS // HALF  # words of a token
    blocks: tl.constexpr = J // OWN
    page, b = tl.program_id(0), tl.program_id(2)
    g, heads = tl.program_id(1) // blocks, tl.num_programs(1) // blocks
    j = tl.program_id(1) % blocks * OWN + tl.arange(0, OWN)
    t, p = tl.arange(0, PAGE), tl.arange(0, PAIRS)
    pair = p // OWN * J + tl.program_id(1) % blocks * OWN + p % OWN
    place = tl.load(places + b * pages + page) * heads + g
    row = x + b.to(tl.int64) * x_row + g * x_head + page.to(tl.int64) * PAGE * R
    first = tl.load(row + t[:, None] * R + pair[None, :]).to(tl.float32)
    second = tl.load(row + t[:, None] * R + R // 2 + pair[None, :]).to(tl.float32)
    first = _below(_above(first, -1e18), 1e18)  # infinities have an angle, too
    second = _below(_above(second, -1e18), 1e18)
    radii, of_radii = _steps(tl.sqrt_rn(first * first + second * second), RADIUS)
    angles, of_angles = _steps(_angle(first, second), ANGLE)
    low, top = _packed(tl.reshape(radii, [PAGE, HALF, OWN]), 0, BITS)
    more, upper = _packed(tl.reshape(angles, [PAGE, HALF, OWN]), HALF, BITS)
    at = t[:, None] * J + j[None, :]
    _store(at_record(words, place, record) + at, low | more)
    if BITS == 3:
        _store(at_record(high, place, record) + at, top | upper)
    at = at_record(numbers, place, record) + pair
    tl.store(at, of_radii)
    tl.store(at + R // 2, of_angles)
