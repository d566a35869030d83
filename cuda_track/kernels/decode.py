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

from __future__ import annotations

import triton
import triton.language as tl

from cuda_track.kernels.chained import after, before
from cuda_track.kernels.codes import OFFSET, gain_bits, halves, planes

LANES = tl.constexpr(8)  # rows of a matrix unit's result that lie in different lanes


@triton.jit
def _score(s, q, k, i: tl.constexpr, numbers, shift, sums, EACH: tl.constexpr, part):
    """Add plane i to the scores s [T, N]. part: products of the group so far, without the offset's share. EACH
    planes share a scale; after the last of them scale and bias are applied."""
    if i % EACH == 0:
        part = tl.zeros_like(s) - shift[None, :]
    part = tl.dot(k, q, part)
    if i % EACH == EACH - 1:
        scale, bias = halves(numbers)
        s += part * scale[:, None] + bias[:, None] * sums[None, :]
    return s, part


@triton.jit
def _fold(q, numbers, i: tl.constexpr, inverse, shift, extra, BITS: tl.constexpr):
    """q^T [J, N] of plane i with the scales of its channels, float16. shift, extra [J, N]: sums of the rounded
    queries, and of their products with biases."""
    scale, bias = halves(numbers)
    folded = (q * (scale * inverse)[:, None]).to(tl.float16)
    gain = tl.exp2(gain_bits(tl.zeros_like(numbers) + i, BITS).to(tl.float32))
    return folded, shift + folded.to(tl.float32), extra + q * (bias * gain)[:, None]


@triton.jit
def _fold_all(
    q0, q1, q2, q3, q4, q5, q6, q7, numbers, J: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr
):  # fmt: skip
    """Queries of a page with the scales of its channels, divided by the largest; that scale; what the offset of
    codes, and what biases, add to a score [N]."""
    j = tl.arange(0, J)
    m0 = tl.load(numbers + j)
    m1 = tl.load(numbers + J + j)
    m2 = tl.load(numbers + 2 * J + j)
    m3 = tl.load(numbers + 3 * J + j)
    m4, m5, m6, m7 = m0, m1, m2, m3
    if PLANES == 8:
        m4 = tl.load(numbers + 4 * J + j)
        m5 = tl.load(numbers + 5 * J + j)
        m6 = tl.load(numbers + 6 * J + j)
        m7 = tl.load(numbers + 7 * J + j)
    # Non-negative scales are ordered as their bits.
    low = tl.maximum(tl.maximum(m0 & 0xFFFF, m1 & 0xFFFF), tl.maximum(m2 & 0xFFFF, m3 & 0xFFFF))
    high = tl.maximum(tl.maximum(m4 & 0xFFFF, m5 & 0xFFFF), tl.maximum(m6 & 0xFFFF, m7 & 0xFFFF))
    largest = tl.max(tl.maximum(low, high), 0)
    largest = tl.where(largest > 0, largest, 1).to(tl.int16).to(tl.float16, bitcast=True)
    largest = largest.to(tl.float32)
    inverse = 1.0 / largest
    shift = tl.zeros([J, q0.shape[1]], tl.float32)
    q0, shift, extra = _fold(q0, m0, 0, inverse, shift, shift, BITS)
    q1, shift, extra = _fold(q1, m1, 1, inverse, shift, extra, BITS)
    q2, shift, extra = _fold(q2, m2, 2, inverse, shift, extra, BITS)
    q3, shift, extra = _fold(q3, m3, 3, inverse, shift, extra, BITS)
    if PLANES == 8:
        q4, shift, extra = _fold(q4, m4, 4, inverse, shift, extra, BITS)
        q5, shift, extra = _fold(q5, m5, 5, inverse, shift, extra, BITS)
        q6, shift, extra = _fold(q6, m6, 6, inverse, shift, extra, BITS)
        q7, shift, extra = _fold(q7, m7, 7, inverse, shift, extra, BITS)
    return q0, q1, q2, q3, q4, q5, q6, q7, largest, tl.sum(shift, 0) * OFFSET, tl.sum(extra, 0)


@triton.jit
def _weigh(p, numbers, total, biases, ones, decay):
    """Weights p [T, N] times the scales of a group, float16; running sums of them [16, N], every row the same,
    and of the biases [LANES, N]. The sum of the rounded weights takes the offset of codes out again."""
    scale, bias = halves(numbers)
    weighed = (p * scale[:, None]).to(tl.float16)
    total = _on(total, decay, ones, weighed)
    return weighed, total, biases * decay[None, :] + _some(p * bias[:, None])


@triton.jit
def _on(total, decay, a, b):
    """total * decay + a @ b. The product starts at 0, and `fma` keeps Triton from joining the two: matrix units cut
    off the lowest bits of a sum, which in long sums of 1024 + code are bits of the output."""
    part = tl.dot(a, b)
    return tl.fma(total, tl.broadcast_to(decay[None, :], part.shape), part)


@triton.jit
def _some(x):
    """Sum x [T, N] to [LANES, N], without exchange between lanes."""
    return tl.sum(tl.reshape(x, [x.shape[0] // LANES, LANES, x.shape[1]]), 0)


@triton.jit
def _finish(out, there, o, i: tl.constexpr, total, biases, BITS: tl.constexpr):
    """Store plane i of the output without offset and gain, with its biases, for rows that exist."""
    biases, offset = tl.sum(biases, 0), tl.sum(total, 0) * (OFFSET / 16)
    gain = tl.exp2(-gain_bits(tl.zeros_like(biases).to(tl.int32) + i, BITS).to(tl.float32))
    o = (o - offset[None, :]) * gain[None, :] + biases[None, :]
    tl.store(out, o, mask=there[None, :])


@triton.jit
def _capped(s, cap):
    """cap tanh(s / cap), of scores and a cap in base-2 exponents (Gemma 2)."""
    return cap - 2.0 * cap / (tl.exp2(s * (2.8853900817779268 / cap)) + 1.0)


# Sizes that grow with the context must not cause another compilation.
COUNTS = ["sink_tokens", "live_tokens", "mask_row", "most", "splits", "rows", "new"]


@triton.jit(do_not_specialize=COUNTS)
def attend_kernel(
    q, sums, factors, plain,  # [B, G, N, R] float16, [B, G, 2, KG, N], [B, G, N], [B, H, L, D]
    k_words, k_high, k_numbers, v_words, v_high, v_numbers,
    table, pages,  # [B, most] int32, [B] int32
    sink_k, sink_v, live_k, live_v,  # windows, [B, G, T, D]
    sink_tokens, live_tokens, sink_stride, live_stride, sink_row, live_row,
    mask, mask_row,  # uint8 [B, tokens], or nothing
    part_out, part_top, part_sum,  # [B, G, S, N, R], [B, G, S, N] twice, S of splits and windows
    most, splits, rows, new, plain_scale, cap,
    R: tl.constexpr, N: tl.constexpr, T: tl.constexpr, WINDOW: tl.constexpr,
    PAGE: tl.constexpr, CHANNEL: tl.constexpr,
    K_BITS: tl.constexpr, K_PLANES: tl.constexpr, K_GROUPS: tl.constexpr,
    V_BITS: tl.constexpr, V_PLANES: tl.constexpr, V_GROUPS: tl.constexpr,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
    CHAINED: tl.constexpr, EARLY: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (splits + programs of windows, G, B). rows: of a group, heads times `new` tokens; N: padded. T: tokens of a
    turn. CHANNEL: tokens of a page of keys that share scales per channel, 0: scales are per token. CAPPED: scores are
    bent to stay below `cap`. WIDE: windows are multiplied in float32, since Triton's interpreter has no bfloat16."""
    split, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = b.to(tl.int64) * tl.num_programs(1) + g
    at = (head * tl.num_programs(0) + split) * N
    after(CHAINED)
    before(CHAINED and EARLY)
    if split >= splits:
        _windows(
            split - splits, tl.num_programs(0) - splits,
            plain + head * rows * R, sink_k, sink_v, live_k, live_v, b, g,
            sink_tokens, live_tokens, sink_stride, live_stride, sink_row, live_row,
            mask + b * mask_row, tl.load(pages + b) * PAGE,
            part_out + at * R, part_top + at, part_sum + at,
            rows, new, plain_scale, cap, R, N, WINDOW, MASKED, CAPPED, WIDE,
        )  # fmt: skip
    else:
        _pages(
            q + head * N * R, sums + head * 2 * K_GROUPS * N, factors + head * N,
            k_words, k_high, k_numbers, v_words, v_high, v_numbers,
            table + b * most, tl.load(pages + b), split, splits, g, tl.num_programs(1),
            mask + b * mask_row + sink_tokens, part_out + at * R, part_top + at, part_sum + at, rows, cap,
            R, N, T, PAGE, CHANNEL, K_BITS, K_PLANES, K_GROUPS, V_BITS, V_PLANES, V_GROUPS,
            MASKED, CAPPED, ASM, STAGES,
        )  # fmt: skip
    before(CHAINED and not EARLY)


@triton.jit
def _pages(
    q, sums, factors, k_words, k_high, k_numbers, v_words, v_high, v_numbers,
    table, pages, split, splits, g, heads, mask, part_out, part_top, part_sum, rows, cap,
    R: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
    PAGE: tl.constexpr, CHANNEL: tl.constexpr,
    K_BITS: tl.constexpr, K_PLANES: tl.constexpr, K_GROUPS: tl.constexpr,
    V_BITS: tl.constexpr, V_PLANES: tl.constexpr, V_GROUPS: tl.constexpr,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    KJ: tl.constexpr = R // K_PLANES
    VJ: tl.constexpr = R // V_PLANES
    KE: tl.constexpr = K_PLANES // K_GROUPS
    VE: tl.constexpr = V_PLANES // V_GROUPS
    n = tl.arange(0, N)
    kj, vj = tl.arange(0, KJ), tl.arange(0, VJ)
    at_q = q + n[None, :] * R + kj[:, None]  # q^T of a plane [J, N]
    q0 = tl.load(at_q)
    q1 = tl.load(at_q + KJ)
    q2 = tl.load(at_q + 2 * KJ)
    q3 = tl.load(at_q + 3 * KJ)
    q4, q5, q6, q7 = q0, q0, q0, q0
    if K_PLANES == 8:
        q4 = tl.load(at_q + 4 * KJ)
        q5 = tl.load(at_q + 5 * KJ)
        q6 = tl.load(at_q + 6 * KJ)
        q7 = tl.load(at_q + 7 * KJ)
    factor = tl.load(factors + n)
    top = tl.full([N], -float("inf"), tl.float32)
    total = tl.zeros([LANES, N], tl.float32)
    o0 = tl.zeros([VJ, N], tl.float32)
    o1, o2, o3, o4, o5, o6, o7 = o0, o0, o0, o0, o0, o0, o0
    # Of a group of values: sums of weights and of biases. Only V_GROUPS of them are used.
    t0, b0 = tl.zeros([16, N], tl.float32), tl.zeros([LANES, N], tl.float32)
    t1, t2, t3, t4, t5, t6, t7 = t0, t0, t0, t0, t0, t0, t0
    b1, b2, b3, b4, b5, b6, b7 = b0, b0, b0, b0, b0, b0, b0
    ones = tl.full([16, T], 1.0, tl.float16)
    shifts = sums + K_GROUPS * N
    first = (split.to(tl.int64) * pages // splits).to(tl.int32)
    last = ((split.to(tl.int64) + 1) * pages // splits).to(tl.int32)
    for page in tl.range(first, last, num_stages=STAGES):
        place = tl.load(table + page).to(tl.int64) * heads + g
        for turn in tl.static_range(PAGE // T):
            t = turn * T + tl.arange(0, T)
            kw = tl.load(k_words + place * (PAGE * KJ) + t[:, None] * KJ + kj[None, :])
            vw = tl.load(v_words + place * (PAGE * VJ) + vj[:, None] * PAGE + t[None, :])
            kh, vh = kw, vw
            if K_BITS == 3:
                kh = tl.load(k_high + place * (PAGE * KJ) + t[:, None] * KJ + kj[None, :])
            if V_BITS == 3:
                vh = tl.load(v_high + place * (PAGE * VJ) + vj[:, None] * PAGE + t[None, :])
            vn = v_numbers + place * (V_GROUPS * PAGE) + t

            k0, k1, k2, k3, k4, k5, k6, k7 = planes(kw, kh, K_BITS, K_PLANES, ASM)
            if CHANNEL:
                if turn * T % CHANNEL == 0:
                    kn = k_numbers + (place * (PAGE // CHANNEL) + turn * T // CHANNEL) * R
                    f0, f1, f2, f3, f4, f5, f6, f7, largest, shift, extra = _fold_all(
                        q0, q1, q2, q3, q4, q5, q6, q7, kn, KJ, K_BITS, K_PLANES
                    )
                    scaled, extra = factor * largest, factor * extra
                s = tl.dot(k0, f0, tl.zeros([T, N], tl.float32) - shift[None, :])
                s = tl.dot(k1, f1, s)
                s = tl.dot(k2, f2, s)
                s = tl.dot(k3, f3, s)
                if K_PLANES == 8:
                    s = tl.dot(k4, f4, s)
                    s = tl.dot(k5, f5, s)
                    s = tl.dot(k6, f6, s)
                    s = tl.dot(k7, f7, s)
            else:
                kn = k_numbers + place * (K_GROUPS * PAGE) + t
                scaled, extra, s = factor, tl.zeros([N], tl.float32), tl.zeros([T, N], tl.float32)
                m, u, w = tl.load(kn), tl.load(sums + n), tl.load(shifts + n)
                s, part = _score(s, q0, k0, 0, m, w, u, KE, s)
                if KE == 1:
                    m = tl.load(kn + 1 // KE * PAGE)
                    u, w = tl.load(sums + 1 // KE * N + n), tl.load(shifts + 1 // KE * N + n)
                s, part = _score(s, q1, k1, 1, m, w, u, KE, part)
                if KE <= 2:
                    m = tl.load(kn + 2 // KE * PAGE)
                    u, w = tl.load(sums + 2 // KE * N + n), tl.load(shifts + 2 // KE * N + n)
                s, part = _score(s, q2, k2, 2, m, w, u, KE, part)
                if KE == 1:
                    m = tl.load(kn + 3 // KE * PAGE)
                    u, w = tl.load(sums + 3 // KE * N + n), tl.load(shifts + 3 // KE * N + n)
                s, part = _score(s, q3, k3, 3, m, w, u, KE, part)
                if K_PLANES == 8:
                    if KE <= 4:
                        m = tl.load(kn + 4 // KE * PAGE)
                        u, w = tl.load(sums + 4 // KE * N + n), tl.load(shifts + 4 // KE * N + n)
                    s, part = _score(s, q4, k4, 4, m, w, u, KE, part)
                    if KE == 1:
                        m = tl.load(kn + 5 // KE * PAGE)
                        u, w = tl.load(sums + 5 // KE * N + n), tl.load(shifts + 5 // KE * N + n)
                    s, part = _score(s, q5, k5, 5, m, w, u, KE, part)
                    if KE <= 2:
                        m = tl.load(kn + 6 // KE * PAGE)
                        u, w = tl.load(sums + 6 // KE * N + n), tl.load(shifts + 6 // KE * N + n)
                    s, part = _score(s, q6, k6, 6, m, w, u, KE, part)
                    if KE == 1:
                        m = tl.load(kn + 7 // KE * PAGE)
                        u, w = tl.load(sums + 7 // KE * N + n), tl.load(shifts + 7 // KE * N + n)
                    s, part = _score(s, q7, k7, 7, m, w, u, KE, part)
            by, more = scaled, extra
            if CAPPED:
                s = _capped(s * scaled[None, :] + extra[None, :], cap)
                by, more = tl.full([N], 1.0, tl.float32), tl.zeros([N], tl.float32)
            if MASKED:
                seen = tl.load(mask + page * PAGE + t) != 0
                s = tl.where(seen[:, None], s, -1e30)

            higher = tl.maximum(top, tl.max(s, 0) * by + more)
            p = tl.exp2(s * by[None, :] + (more - higher)[None, :])
            decay = tl.exp2(top - higher)
            top = higher
            total = total * decay[None, :] + _some(p)
            v0, v1, v2, v3, v4, v5, v6, v7 = planes(vw, vh, V_BITS, V_PLANES, ASM)
            w, t0, b0 = _weigh(p, tl.load(vn), t0, b0, ones, decay)
            o0 = _on(o0, decay, v0, w)
            if VE == 1:
                w, t1, b1 = _weigh(p, tl.load(vn + 1 // VE * PAGE), t1, b1, ones, decay)
            o1 = _on(o1, decay, v1, w)
            if VE <= 2:
                w, t2, b2 = _weigh(p, tl.load(vn + 2 // VE * PAGE), t2, b2, ones, decay)
            o2 = _on(o2, decay, v2, w)
            if VE == 1:
                w, t3, b3 = _weigh(p, tl.load(vn + 3 // VE * PAGE), t3, b3, ones, decay)
            o3 = _on(o3, decay, v3, w)
            if V_PLANES == 8:
                if VE <= 4:
                    w, t4, b4 = _weigh(p, tl.load(vn + 4 // VE * PAGE), t4, b4, ones, decay)
                o4 = _on(o4, decay, v4, w)
                if VE == 1:
                    w, t5, b5 = _weigh(p, tl.load(vn + 5 // VE * PAGE), t5, b5, ones, decay)
                o5 = _on(o5, decay, v5, w)
                if VE <= 2:
                    w, t6, b6 = _weigh(p, tl.load(vn + 6 // VE * PAGE), t6, b6, ones, decay)
                o6 = _on(o6, decay, v6, w)
                if VE == 1:
                    w, t7, b7 = _weigh(p, tl.load(vn + 7 // VE * PAGE), t7, b7, ones, decay)
                o7 = _on(o7, decay, v7, w)

    # A plane's sums are those of the first plane of its group.
    if VE >= 2:
        t1, t3, t5, t7 = t0, t2, t4, t6
        b1, b3, b5, b7 = b0, b2, b4, b6
    if VE >= 4:
        t2, t3, t6, t7 = t0, t0, t4, t4
        b2, b3, b6, b7 = b0, b0, b4, b4
    if VE >= 8:
        t4, t5, t6, t7 = t0, t0, t0, t0
        b4, b5, b6, b7 = b0, b0, b0, b0
    out, there = part_out + n[None, :] * R + vj[:, None], n < rows
    _finish(out, there, o0, 0, t0, b0, V_BITS)
    _finish(out + VJ, there, o1, 1, t1, b1, V_BITS)
    _finish(out + 2 * VJ, there, o2, 2, t2, b2, V_BITS)
    _finish(out + 3 * VJ, there, o3, 3, t3, b3, V_BITS)
    if V_PLANES == 8:
        _finish(out + 4 * VJ, there, o4, 4, t4, b4, V_BITS)
        _finish(out + 5 * VJ, there, o5, 5, t5, b5, V_BITS)
        _finish(out + 6 * VJ, there, o6, 6, t6, b6, V_BITS)
        _finish(out + 7 * VJ, there, o7, 7, t7, b7, V_BITS)
    tl.store(part_top + n, top)
    tl.store(part_sum + n, tl.sum(total, 0))


@triton.jit
def _windows(
    part, parts, q, sink_k, sink_v, live_k, live_v, b, g,
    sink_tokens, live_tokens, sink_stride, live_stride, sink_row, live_row, mask, paged,
    part_out, part_top, part_sum, rows, new, scale, cap,
    D: tl.constexpr, N: tl.constexpr, T: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Sink and live tokens, in the model's domain; every `parts`-th T of them. *_stride: of a head,
    *_row: of a batch row."""
    n, t, d = tl.arange(0, N), tl.arange(0, T), tl.arange(0, D)
    dtype = tl.float32 if WIDE else live_k.dtype.element_ty
    turned = tl.load(q + n[None, :] * D + d[:, None], mask=n[None, :] < rows, other=0.0)
    turned = turned.to(dtype)  # q^T [D, N]
    # Row i of a group is token i % new of its head: it sees that many tokens less at the end.
    seen_by = live_tokens - new + 1 + n % new
    top = tl.full([N], -1e30, tl.float32)
    total = tl.zeros([N], tl.float32)
    out = tl.zeros([D, N], tl.float32)
    sink_blocks = (sink_tokens + T - 1) // T
    for i in tl.range(part, sink_blocks + (live_tokens + T - 1) // T, parts, num_stages=1):
        live = i >= sink_blocks
        start = tl.where(live, i - sink_blocks, i) * T
        count = tl.where(live, live_tokens, sink_tokens)
        place = start + t
        if live:
            keys = live_k + b * live_row + g * live_stride
            values = live_v + b * live_row + g * live_stride
        else:
            keys = sink_k + b * sink_row + g * sink_stride
            values = sink_v + b * sink_row + g * sink_stride
        there = place < count
        k = tl.load(keys + place[:, None] * D + d[None, :], mask=there[:, None], other=0.0)
        s = tl.dot(k.to(dtype), turned, input_precision="ieee") * scale
        if CAPPED:
            s = _capped(s, cap)
        allowed = there[:, None] & ((place[:, None] < seen_by[None, :]) | (not live))
        if MASKED:
            shift = tl.where(live, sink_tokens + paged, 0)
            seen = tl.load(mask + shift + place, mask=there, other=0) != 0
            allowed = allowed & seen[:, None]
        s = tl.where(allowed, s, -1e30)
        higher = tl.maximum(top, tl.max(s, 0))
        p = tl.where(allowed, tl.exp2(s - higher[None, :]), 0.0)
        decay = tl.exp2(top - higher)
        top = higher
        total = total * decay + tl.sum(p, 0)
        v = tl.load(values + place[None, :] * D + d[:, None], mask=there[None, :], other=0.0)
        out = tl.dot(v.to(dtype), p.to(dtype), out * decay[None, :], input_precision="ieee")
    tl.store(part_out + n[None, :] * D + d[:, None], out, mask=n[None, :] < rows)
    tl.store(part_top + n, top)
    tl.store(part_sum + n, total)
