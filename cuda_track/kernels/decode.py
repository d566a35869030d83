"""Decode attention in Triton: pages of codes and windows in full precision, split over the tokens.

A program takes one kv head and a run of pages, or the windows, and computes for all query heads of
the group at once: scores^T = K q^T [tokens, rows], then out^T += V^T p^T [dims, rows]. Tokens (or
dims) are the wide side of the matrix product, so that few rows waste little of it.

A code becomes a float16 by OR-ing the exponent of 1024 into its bits: 1024 + gain * code. Gains are taken
out of the queries, or of the outputs. The offset, and the bias, belong to a group of dims: they come
after the products, from sums of the queries (keys), or of the weights (values). Scores are
scaled per token after the product, weights before it. Where a page of keys has a scale per channel,
its scales go into the queries, once per page, and its biases become one number per query.
"""

# Kernels are in Triton's language, which its stubs do not make Python: constants are not numbers, loops no iterables.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from cuda_track.kernels.chained import launch_next, wait_for_previous
from cuda_track.kernels.codes import (
    OFFSET,
    at_record,
    cos_and_sin,
    gain_bits,
    halves,
    level_planes,
    planes,
)

LANES = tl.constexpr(8)  # rows of a matrix unit's result that lie in different lanes


class SideConstants(NamedTuple):
    """How the codes of one side are read. GROUPS: scales of a token. KIND: "affine", "codebook" or "polar"."""

    BITS: int
    PLANES: int
    GROUPS: int
    KIND: str = "affine"


class Constants(NamedTuple):
    """What `attend_kernel` is compiled for.

    R: stored dims. N: padded rows of a group. T: tokens of a step. WINDOW: tokens of a step of the windows. PAGE:
    tokens of a page. CHANNEL: tokens of a page of keys that share scales per channel, 0: scales are per token. CAPPED:
    scores are bent to stay below `cap`. ASM: unpack by PTX. STAGES: of the pipeline. WIDE: windows are multiplied in
    float32, since Triton's interpreter has no bfloat16.
    """

    K: SideConstants
    V: SideConstants
    R: int
    N: int
    T: int
    WINDOW: int
    PAGE: int
    RECORD: int
    CHANNEL: int
    MASKED: bool
    CAPPED: bool
    ASM: bool
    STAGES: int
    WIDE: bool


@triton.jit
def _fold(q, numbers, J: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr):
    """Return queries of a page, by plane [J, N] float16, with the scales of its channels, divided by the largest;
    that scale; what the offset of codes, and what biases, add to a score [N]."""
    j = tl.arange(0, J)
    pairs, tops = (), tl.zeros([J], tl.int32)  # non-negative scales are ordered as their bits
    for i in tl.static_range(PLANES):
        pairs += (tl.load(numbers + i * J + j),)
        tops = tl.maximum(tops, pairs[i] & 0xFFFF)
    largest = tl.max(tops, 0)
    largest = tl.where(largest > 0, largest, 1).to(tl.int16).to(tl.float16, bitcast=True)
    largest = largest.to(tl.float32)
    inverse = 1.0 / largest
    folded, shift = (), tl.zeros([J, q[0].shape[1]], tl.float32)
    extra = shift
    for i in tl.static_range(PLANES):
        scale, bias = halves(pairs[i])
        folded += ((q[i] * (scale * inverse)[:, None]).to(tl.float16),)
        gain = tl.exp2(gain_bits(tl.zeros_like(j) + i, BITS).to(tl.float32))
        shift += folded[i].to(tl.float32)
        extra += q[i] * (bias * gain)[:, None]
    return folded, largest, tl.sum(shift, 0) * OFFSET, tl.sum(extra, 0)


@triton.jit
def _unpacked(words, high, R: tl.constexpr, SIDE: tl.constexpr, ASM: tl.constexpr):
    """Planes of one side, float16: levels, or 1024 + gain * code."""
    if SIDE.KIND == "codebook":
        return level_planes(words, high, R, SIDE.BITS, SIDE.PLANES, ASM)
    return planes(words, high, SIDE.BITS, SIDE.PLANES, ASM)


@triton.jit
def _polar_scores(s, k, q, numbers, J: tl.constexpr, SIDE: tl.constexpr, ASM: tl.constexpr):
    """s [T, N] + keys q: planes k hold radii and then angles, and a pair of dims is rebuilt from both.

    The paper's look-up instead takes a table of 2^bits products for each pair and row of queries, anew for each page:
    as many products for N rows of 128 tokens, and a gather of 32 bits from shared memory for each code and row, where
    matrix units multiply here."""
    HALF: tl.constexpr = SIDE.PLANES // 2
    for i in tl.static_range(HALF):
        radius = _middle(k[i], numbers + i * J, i, J, SIDE.BITS)
        angle = _middle(k[HALF + i], numbers + (HALF + i) * J, HALF + i, J, SIDE.BITS)
        cos, sin = cos_and_sin(angle, ASM)
        s = tl.dot((radius * cos).to(tl.float16), q[i], s)
        s = tl.dot((radius * sin).to(tl.float16), q[HALF + i], s)
    return s


@triton.jit
def _middle(plane, numbers, i: tl.constexpr, J: tl.constexpr, BITS: tl.constexpr):
    """Return the middles of the steps of plane i, float32 [T, J]."""
    step, low = halves(tl.load(numbers + tl.arange(0, J)))
    gain = tl.exp2(-gain_bits(tl.zeros_like(step).to(tl.int32) + i, BITS).to(tl.float32))
    step = step * gain
    low = low + (0.5 / gain - OFFSET) * step
    return low[None, :] + plane.to(tl.float32) * step[None, :]


@triton.jit
def _weigh(p, numbers, total, biases, ones, decay):
    """Weights p [T, N] times the scales of a group, float16; running sums of them [16, N], every row the same,
    and of the biases [LANES, N]. The sum of the rounded weights takes the offset of codes out again."""
    scale, bias = halves(numbers)
    weighed = (p * scale[:, None]).to(tl.float16)
    total = _on(total, decay, ones, weighed)
    return weighed, total, biases * decay[None, :] + _lane_sums(p * bias[:, None])


@triton.jit
def _on(total, decay, a, b):
    """total * decay + a @ b. The product starts at 0, and `fma` keeps Triton from joining the two: matrix units cut
    off the lowest bits of a sum, which in long sums of 1024 + code are bits of the output."""
    part = tl.dot(a, b)
    return tl.fma(total, tl.broadcast_to(decay[None, :], part.shape), part)


@triton.jit
def _lane_sums(x):
    """Sum x [T, N] to [LANES, N], without exchange between lanes."""
    return tl.sum(tl.reshape(x, [x.shape[0] // LANES, LANES, x.shape[1]]), 0)


@triton.jit
def _finish(out, exists, o, i: tl.constexpr, total, biases, SIDE: tl.constexpr):
    """Store plane i of the output without offset and gain, with its biases, for rows that exist."""
    if SIDE.KIND == "affine":
        biases, offset = tl.sum(biases, 0), tl.sum(total, 0) * (OFFSET / 16)
        bits = gain_bits(tl.zeros_like(biases).to(tl.int32) + i, SIDE.BITS)
        o = (o - offset[None, :]) * tl.exp2(-bits.to(tl.float32))[None, :] + biases[None, :]
    tl.store(out, o, mask=exists[None, :])


@triton.jit
def _capped(s, cap):
    """cap tanh(s / cap), of scores and a cap in base-2 exponents (Gemma 2)."""
    return cap - 2.0 * cap / (tl.exp2(s * (2.8853900817779268 / cap)) + 1.0)


# Sizes that grow with the context must not cause another compilation.
COUNTS = ["sink_tokens", "recent_tokens", "mask_row", "row_pages", "splits", "rows", "new"]


@triton.jit(do_not_specialize=COUNTS)
def attend_kernel(
    q, sums, factors, plain,  # [B, G, N, R] float16, [B, G, 2, KG, N], [B, G, N], [B, H, L, D]
    k_words, k_high, k_numbers, v_words, v_high, v_numbers,
    table, pages,  # [B, row_pages] int32, [B] int32
    sink_k, sink_v, recent_k, recent_v,  # windows, [B, G, T, D]
    sink_tokens, recent_tokens, sink_stride, recent_stride, sink_row, recent_row,
    mask, mask_row,  # uint8 [B, tokens], or nothing
    part_out, part_top, part_sum,  # [B, G, S, N, R], [B, G, S, N] twice, S of splits and windows
    row_pages, splits, rows, new, plain_scale, cap,
    C: tl.constexpr, CHAINED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (splits + programs of windows, G, B). C: `Constants`. rows: of a group, heads times `new` tokens."""
    R: tl.constexpr = C.R
    N: tl.constexpr = C.N
    split, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = b.to(tl.int64) * tl.num_programs(1) + g
    at = (head * tl.num_programs(0) + split) * N
    wait_for_previous(CHAINED)
    launch_next(CHAINED and EARLY)
    if split >= splits:
        _windows(
            split - splits, tl.num_programs(0) - splits,
            plain + head * rows * R, sink_k, sink_v, recent_k, recent_v, b, g,
            sink_tokens, recent_tokens, sink_stride, recent_stride, sink_row, recent_row,
            mask + b * mask_row, tl.load(pages + b) * C.PAGE,
            part_out + at * R, part_top + at, part_sum + at, rows, new, plain_scale, cap, C,
        )  # fmt: skip
    else:
        pages_of_codes(
            q + head * N * R, sums + head * 2 * C.K.GROUPS * N, factors + head * N,
            k_words, k_high, k_numbers, v_words, v_high, v_numbers,
            table + b * row_pages, tl.load(pages + b), split, splits, g, tl.num_programs(1),
            mask + b * mask_row + sink_tokens, part_out + at * R, part_top + at, part_sum + at, rows, cap, C,
        )  # fmt: skip
    launch_next(CHAINED and not EARLY)


@triton.jit
def pages_of_codes(
    queries, sums, factors, k_words, k_high, k_numbers, v_words, v_high, v_numbers,
    table, pages, split, splits, g, heads, mask, part_out, part_top, part_sum, rows, cap,
    C: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = C.R
    N: tl.constexpr = C.N
    T: tl.constexpr = C.T
    PAGE: tl.constexpr = C.PAGE
    K: tl.constexpr = C.K
    V: tl.constexpr = C.V
    K_PLANES: tl.constexpr = C.K.PLANES
    V_PLANES: tl.constexpr = C.V.PLANES
    KJ: tl.constexpr = R // K_PLANES
    VJ: tl.constexpr = R // V_PLANES
    V_GROUPS: tl.constexpr = C.V.GROUPS
    KE: tl.constexpr = K_PLANES // C.K.GROUPS
    VE: tl.constexpr = V_PLANES // V_GROUPS
    n = tl.arange(0, N)
    kj, vj = tl.arange(0, KJ), tl.arange(0, VJ)
    q = ()  # q^T of each plane [J, N]
    for i in tl.static_range(K_PLANES):
        q += (tl.load(queries + n[None, :] * R + i * KJ + kj[:, None]),)
    factor = tl.load(factors + n)
    top = tl.full([N], -float("inf"), tl.float32)
    total = tl.zeros([LANES, N], tl.float32)
    # Of each plane of values a sum of the output; of each of their groups sums of weights and of biases.
    out = (tl.zeros([VJ, N], tl.float32),) * V_PLANES
    weights = (tl.zeros([16, N], tl.float32),) * V_GROUPS
    biases = (tl.zeros([LANES, N], tl.float32),) * V_GROUPS
    ones = tl.full([16, T], 1.0, tl.float16)
    shifts = sums + C.K.GROUPS * N
    first = (split.to(tl.int64) * pages // splits).to(tl.int32)
    last = ((split.to(tl.int64) + 1) * pages // splits).to(tl.int32)
    for page in tl.range(first, last, num_stages=C.STAGES):
        place = tl.load(table + page).to(tl.int64) * heads + g
        for step in tl.static_range(PAGE // T):
            t = step * T + tl.arange(0, T)
            kw = tl.load(at_record(k_words, place, C.RECORD) + t[:, None] * KJ + kj[None, :])
            vw = tl.load(at_record(v_words, place, C.RECORD) + vj[:, None] * PAGE + t[None, :])
            kh, vh = kw, vw
            if C.K.BITS == 3:
                kh = tl.load(at_record(k_high, place, C.RECORD) + t[:, None] * KJ + kj[None, :])
            if C.V.BITS == 3:
                vh = tl.load(at_record(v_high, place, C.RECORD) + vj[:, None] * PAGE + t[None, :])
            vn = at_record(v_numbers, place, C.RECORD) + t

            k = _unpacked(kw, kh, R, K, C.ASM)
            if C.K.KIND == "polar":
                kn = at_record(k_numbers, place, C.RECORD)
                scaled, extra = factor, tl.zeros([N], tl.float32)
                s = _polar_scores(tl.zeros([T, N], tl.float32), k, q, kn, KJ, K, C.ASM)
            elif C.CHANNEL:
                if step * T % C.CHANNEL == 0:
                    kn = at_record(k_numbers, place, C.RECORD) + step * T // C.CHANNEL * R
                    folded, largest, shift, extra = _fold(q, kn, KJ, C.K.BITS, K_PLANES)
                    scaled, extra = factor * largest, factor * extra
                s = tl.zeros([T, N], tl.float32) - shift[None, :]
                for i in tl.static_range(K_PLANES):
                    s = tl.dot(k[i], folded[i], s)
            else:
                kn = at_record(k_numbers, place, C.RECORD) + t
                scaled, extra, s = factor, tl.zeros([N], tl.float32), tl.zeros([T, N], tl.float32)
                for i in tl.static_range(K_PLANES):
                    if i % KE == 0:  # a group begins: its products, without the offset's share
                        at = i // KE * N + n
                        numbers, of_queries = tl.load(kn + i // KE * PAGE), tl.load(sums + at)
                        part = tl.zeros_like(s)
                        if C.K.KIND == "affine":
                            part -= tl.load(shifts + at)[None, :]
                    part = tl.dot(k[i], q[i], part)
                    if i % KE == KE - 1:
                        scale, bias = halves(numbers)
                        s += part * scale[:, None]
                        if C.K.KIND == "affine":
                            s += bias[:, None] * of_queries[None, :]
            by, shift_by = scaled, extra
            if C.CAPPED or C.MASKED:
                s = s * scaled[None, :] + extra[None, :]
                by, shift_by = tl.full([N], 1.0, tl.float32), tl.zeros([N], tl.float32)
            if C.CAPPED:
                s = _capped(s, cap)
            if C.MASKED:  # behind scales: by `fma`, -1e30 times one is not the maximum, rounded
                visible = tl.load(mask + page * PAGE + t) != 0
                s = tl.where(visible[:, None], s, -1e30)

            higher = tl.maximum(top, tl.max(s, 0) * by + shift_by)
            p = tl.exp2(s * by[None, :] + (shift_by - higher)[None, :])
            decay = tl.exp2(top - higher)
            top = higher
            total = total * decay[None, :] + _lane_sums(p)
            v, new_out, new_weights, new_biases = (
                _unpacked(vw, vh, R, V, C.ASM),
                (),
                (),
                (),
            )
            for i in tl.static_range(V_PLANES):
                if i % VE == 0:
                    numbers = tl.load(vn + i // VE * PAGE)
                    sum, bias = weights[i // VE], biases[i // VE]
                    if C.V.KIND == "codebook":  # no bias, and no offset
                        norm, _ = halves(numbers)
                        w = (p * norm[:, None]).to(tl.float16)
                    else:
                        w, sum, bias = _weigh(p, numbers, sum, bias, ones, decay)
                    new_weights += (sum,)
                    new_biases += (bias,)
                new_out += (_on(out[i], decay, v[i], w),)
            out, weights, biases = new_out, new_weights, new_biases

    at = part_out + n[None, :] * R + vj[:, None]
    for i in tl.static_range(V_PLANES):
        _finish(at + i * VJ, n < rows, out[i], i, weights[i // VE], biases[i // VE], V)
    tl.store(part_top + n, top)
    tl.store(part_sum + n, tl.sum(total, 0))


@triton.jit
def _windows(
    part, parts, q, sink_k, sink_v, recent_k, recent_v, b, g,
    sink_tokens, recent_tokens, sink_stride, recent_stride, sink_row, recent_row, mask, paged,
    part_out, part_top, part_sum, rows, new, scale, cap,
    C: tl.constexpr,
):  # fmt: skip
    """Sink and recent tokens, in the model's domain; every `parts`-th T of them. *_stride: of a head,
    *_row: of a batch row."""
    D: tl.constexpr = C.R
    N: tl.constexpr = C.N
    T: tl.constexpr = C.WINDOW
    n, t, d = tl.arange(0, N), tl.arange(0, T), tl.arange(0, D)
    dtype = tl.float32 if C.WIDE else recent_k.dtype.element_ty
    queries = tl.load(q + n[None, :] * D + d[:, None], mask=n[None, :] < rows, other=0.0)
    queries = queries.to(dtype)  # q^T [D, N]
    # Row i of a group is token i % new of its head: it sees that many tokens less at the end.
    seen_by = recent_tokens - new + 1 + n % new
    top = tl.full([N], -1e30, tl.float32)
    total = tl.zeros([N], tl.float32)
    out = tl.zeros([D, N], tl.float32)
    sink_blocks = (sink_tokens + T - 1) // T
    for i in tl.range(part, sink_blocks + (recent_tokens + T - 1) // T, parts, num_stages=1):
        recent = i >= sink_blocks
        start = tl.where(recent, i - sink_blocks, i) * T
        count = tl.where(recent, recent_tokens, sink_tokens)
        place = start + t
        if recent:
            keys = recent_k + b * recent_row + g * recent_stride
            values = recent_v + b * recent_row + g * recent_stride
        else:
            keys = sink_k + b * sink_row + g * sink_stride
            values = sink_v + b * sink_row + g * sink_stride
        exists = place < count
        k = tl.load(keys + place[:, None] * D + d[None, :], mask=exists[:, None], other=0.0)
        s = tl.dot(k.to(dtype), queries, input_precision="ieee") * scale
        if C.CAPPED:
            s = _capped(s, cap)
        allowed = exists[:, None] & ((place[:, None] < seen_by[None, :]) | (not recent))
        if C.MASKED:
            shift = tl.where(recent, sink_tokens + paged, 0)
            visible = tl.load(mask + shift + place, mask=exists, other=0) != 0
            allowed = allowed & visible[:, None]
        s = tl.where(allowed, s, -1e30)
        higher = tl.maximum(top, tl.max(s, 0))
        p = tl.where(allowed, tl.exp2(s - higher[None, :]), 0.0)
        decay = tl.exp2(top - higher)
        top = higher
        total = total * decay + tl.sum(p, 0)
        v = tl.load(values + place[None, :] * D + d[:, None], mask=exists[None, :], other=0.0)
        out = tl.dot(v.to(dtype), p.to(dtype), out * decay[None, :], input_precision="ieee")
    tl.store(part_out + n[None, :] * D + d[:, None], out, mask=n[None, :] < rows)
    tl.store(part_top + n, top)
    tl.store(part_sum + n, total)
