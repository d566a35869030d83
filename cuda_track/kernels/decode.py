"""Decode attention in Triton: pages of codes and windows in full precision, split over the tokens.

A program takes one kv head and a run of pages, or the windows, and computes for all query heads of
the group at once: scores^T = K q^T [tokens, rows], then out^T += V^T p^T [dims, rows]. Tokens (or
dims) are the wide side of the matrix product, so that few rows waste little of it.

A code becomes a float16 by OR-ing the exponent of 1024 into its bits: 1024 + gain * code. Gains are
taken out of the queries, or of the outputs. The offset, and the bias, belong to a group of dims: they
come after the products, from sums of the queries (keys), or of the weights (values). Scores are
scaled per token after the product, weights before it.
"""

from __future__ import annotations

import triton
import triton.language as tl

OFFSET = tl.constexpr(1024.0)
MAGIC = tl.constexpr(0x6400)

# Neighbouring words -> planes of two float16 each: what a lane needs of a fragment. A code may stay
# where it is in the mantissa, where it counts `gain` times: fewer shifts.
FOUR_BITS = tl.constexpr("""{
    .reg .b32 lo, hi, t;
    prmt.b32 lo, $8, $9, 0x5410;
    prmt.b32 hi, $8, $9, 0x7632;
    lop3.b32 $0, lo, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $1, lo, 0x00f000f0, 0x64006400, 0xea;
    shr.b32 t, lo, 8;
    lop3.b32 $2, t, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $3, t, 0x00f000f0, 0x64006400, 0xea;
    lop3.b32 $4, hi, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $5, hi, 0x00f000f0, 0x64006400, 0xea;
    shr.b32 t, hi, 8;
    lop3.b32 $6, t, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $7, t, 0x00f000f0, 0x64006400, 0xea;
}""")
FOUR_BITS_SHORT = tl.constexpr("""{
    .reg .b32 t;
    lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $1, $4, 0x00f000f0, 0x64006400, 0xea;
    shr.b32 t, $4, 8;
    lop3.b32 $2, t, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $3, t, 0x00f000f0, 0x64006400, 0xea;
}""")
TWO_BITS = tl.constexpr("""{
    .reg .b32 t;
    lop3.b32 $0, $8, 0x00030003, 0x64006400, 0xea;
    lop3.b32 $1, $8, 0x000c000c, 0x64006400, 0xea;
    lop3.b32 $2, $8, 0x00300030, 0x64006400, 0xea;
    lop3.b32 $3, $8, 0x00c000c0, 0x64006400, 0xea;
    lop3.b32 $4, $8, 0x03000300, 0x64006400, 0xea;
    shr.b32 t, $8, 10;
    lop3.b32 $5, t, 0x00030003, 0x64006400, 0xea;
    lop3.b32 $6, t, 0x000c000c, 0x64006400, 0xea;
    lop3.b32 $7, t, 0x00300030, 0x64006400, 0xea;
}""")


@triton.jit
def gain_bits(i, BITS: tl.constexpr):
    """log2 of what a code of plane i counts for: where it stays in the mantissa of 1024."""
    return (i % 2) * 4 if BITS == 4 else (i % 5) * 2 if BITS == 2 else i * 0


@triton.jit
def _plane(words, high, i: tl.constexpr, BITS: tl.constexpr):
    """1024 + gain * code of plane i, float16."""
    wide = words.to(tl.int32)
    if BITS == 4:
        code = (wide >> (i // 2 * 8)) & (15 << (i % 2 * 4))
    elif BITS == 2:
        code = (wide >> (i // 5 * 10)) & (3 << (i % 5 * 2))
    elif BITS == 3:
        code = ((wide >> (2 * i)) & 3) | (((high.to(tl.int32) >> i) & 1) << 2)
    else:
        code = (wide >> (BITS * i)) & ((1 << BITS) - 1)
    return (code | MAGIC).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _planes(words, high, BITS: tl.constexpr, PLANES: tl.constexpr, ASM: tl.constexpr):
    """All planes; of four the last four are repeats that nobody reads."""
    if ASM and BITS == 4 and PLANES == 8:
        return tl.inline_asm_elementwise(
            FOUR_BITS,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
            [words],
            (tl.float16,) * 8,
            is_pure=True,
            pack=2,
        )
    if ASM and BITS == 2 and PLANES == 8:
        return tl.inline_asm_elementwise(
            TWO_BITS,
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [words],
            (tl.float16,) * 8,
            is_pure=True,
            pack=2,
        )
    if ASM and BITS == 4 and PLANES == 4:
        a, b, c, d = tl.inline_asm_elementwise(
            FOUR_BITS_SHORT, "=r,=r,=r,=r,r", [words], (tl.float16,) * 4, is_pure=True, pack=2
        )
        return a, b, c, d, a, a, a, a
    a = _plane(words, high, 0, BITS)
    b = _plane(words, high, 1, BITS)
    c = _plane(words, high, 2, BITS)
    d = _plane(words, high, 3, BITS)
    if PLANES == 4:
        return a, b, c, d, a, a, a, a
    e = _plane(words, high, 4, BITS)
    f = _plane(words, high, 5, BITS)
    g = _plane(words, high, 6, BITS)
    h = _plane(words, high, 7, BITS)
    return a, b, c, d, e, f, g, h


@triton.jit
def _halves(numbers):
    """(scale, bias) float32 of packed float16 pairs."""
    scale = (numbers & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    bias = (numbers >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return scale.to(tl.float32), bias.to(tl.float32)


@triton.jit
def _score(s, q, k, i: tl.constexpr, numbers, shift, sums, EACH: tl.constexpr, part):
    """Adds plane i to the scores s [T, N]; part: products of the group so far, less the offset's
    share. EACH planes share a scale; after the last of them scale and bias come on top."""
    if i % EACH == 0:
        part = tl.zeros_like(s) - shift[None, :]
    part = tl.dot(k, q, part)
    if i % EACH == EACH - 1:
        scale, bias = _halves(numbers)
        s += part * scale[:, None] + bias[:, None] * sums[None, :]
    return s, part


@triton.jit
def _weigh(p, numbers, total, biases, ones, decay):
    """Weights p [T, N] with the scales of a group, float16; their sum [16, N], every row the same, and
    that of the biases [N] go on. The offset is taken out by the sum of what was rounded."""
    scale, bias = _halves(numbers)
    weighed = (p * scale[:, None]).to(tl.float16)
    total = tl.dot(ones, weighed, total * decay[None, :])
    return weighed, total, biases * decay + tl.sum(p * bias[:, None], 0)


@triton.jit
def _finish(out, there, o, i: tl.constexpr, total, biases, BITS: tl.constexpr):
    """Plane i of the output without offset and gain, with its biases; of rows that are there."""
    gain = tl.exp2(-gain_bits(tl.zeros_like(biases).to(tl.int32) + i, BITS).to(tl.float32))
    shift = tl.sum(total, 0) * (1.0 / 16) * OFFSET
    o = (o - shift[None, :]) * gain[None, :] + biases[None, :]
    tl.store(out, o, mask=there[None, :])


# What grows with the context must not lead to another compilation.
COUNTS = ["sink_tokens", "live_tokens", "mask_row", "most", "splits", "rows", "new"]


@triton.jit(do_not_specialize=COUNTS)
def attend_kernel(
    q, sums, factors, plain,  # [B, G, N, R] float16, [B, G, 2, KG, N], [B, G, N], [B, H, L, D]
    k_words, k_high, k_numbers, v_words, v_high, v_numbers,
    table, pages,  # [B, most] int32, [B] int32
    sink_k, sink_v, live_k, live_v,  # windows, [B, G, T, D]
    sink_tokens, live_tokens, sink_stride, live_stride, sink_row, live_row,
    mask, mask_row,  # uint8 [B, tokens], or nothing
    part_out, part_top, part_sum,  # [B, G, S + 1, N, R], [B, G, S + 1, N] twice
    most, splits, rows, new, plain_scale,
    R: tl.constexpr, N: tl.constexpr, T: tl.constexpr, WINDOW: tl.constexpr,
    K_BITS: tl.constexpr, K_PLANES: tl.constexpr, K_GROUPS: tl.constexpr,
    V_BITS: tl.constexpr, V_PLANES: tl.constexpr, V_GROUPS: tl.constexpr,
    MASKED: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (splits + 1, G, B). rows: of a group, heads times `new` tokens; N: padded."""
    split, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = b.to(tl.int64) * tl.num_programs(1) + g
    at = (head * (splits + 1) + split) * N
    if split == splits:
        _windows(
            plain + head * rows * R, sink_k, sink_v, live_k, live_v, b, g,
            sink_tokens, live_tokens, sink_stride, live_stride, sink_row, live_row,
            mask + b * mask_row, tl.load(pages + b) * T,
            part_out + at * R, part_top + at, part_sum + at,
            rows, new, plain_scale, R, N, WINDOW, MASKED,
        )  # fmt: skip
    else:
        _pages(
            q + head * N * R, sums + head * 2 * K_GROUPS * N, factors + head * N,
            k_words, k_high, k_numbers, v_words, v_high, v_numbers,
            table + b * most, tl.load(pages + b), split, splits, g, tl.num_programs(1),
            mask + b * mask_row + sink_tokens, part_out + at * R, part_top + at, part_sum + at, rows,
            R, N, T, K_BITS, K_PLANES, K_GROUPS, V_BITS, V_PLANES, V_GROUPS, MASKED, ASM, STAGES,
        )  # fmt: skip


@triton.jit
def _pages(
    q, sums, factors, k_words, k_high, k_numbers, v_words, v_high, v_numbers,
    table, pages, split, splits, g, heads, mask, part_out, part_top, part_sum, rows,
    R: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
    K_BITS: tl.constexpr, K_PLANES: tl.constexpr, K_GROUPS: tl.constexpr,
    V_BITS: tl.constexpr, V_PLANES: tl.constexpr, V_GROUPS: tl.constexpr,
    MASKED: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    KJ: tl.constexpr = R // K_PLANES
    VJ: tl.constexpr = R // V_PLANES
    KE: tl.constexpr = K_PLANES // K_GROUPS
    VE: tl.constexpr = V_PLANES // V_GROUPS
    n, t = tl.arange(0, N), tl.arange(0, T)
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
    total = tl.zeros([N], tl.float32)
    o0 = tl.zeros([VJ, N], tl.float32)
    o1, o2, o3, o4, o5, o6, o7 = o0, o0, o0, o0, o0, o0, o0
    # Of a group of values: sums of weights and of biases. Only V_GROUPS of them are used.
    t0, b0 = tl.zeros([16, N], tl.float32), tl.zeros([N], tl.float32)
    t1, t2, t3, t4, t5, t6, t7 = t0, t0, t0, t0, t0, t0, t0
    b1, b2, b3, b4, b5, b6, b7 = b0, b0, b0, b0, b0, b0, b0
    ones = tl.full([16, T], 1.0, tl.float16)
    shifts = sums + K_GROUPS * N
    first = (split.to(tl.int64) * pages // splits).to(tl.int32)
    last = ((split.to(tl.int64) + 1) * pages // splits).to(tl.int32)
    for page in tl.range(first, last, num_stages=STAGES):
        place = tl.load(table + page).to(tl.int64) * heads + g
        kw = tl.load(k_words + place * (T * KJ) + t[:, None] * KJ + kj[None, :])
        vw = tl.load(v_words + place * (T * VJ) + vj[:, None] * T + t[None, :])
        kh, vh = kw, vw
        if K_BITS == 3:
            kh = tl.load(k_high + place * (T * KJ) + t[:, None] * KJ + kj[None, :])
        if V_BITS == 3:
            vh = tl.load(v_high + place * (T * VJ) + vj[:, None] * T + t[None, :])
        kn = k_numbers + place * (K_GROUPS * T) + t
        vn = v_numbers + place * (V_GROUPS * T) + t

        k0, k1, k2, k3, k4, k5, k6, k7 = _planes(kw, kh, K_BITS, K_PLANES, ASM)
        s = tl.zeros([T, N], tl.float32)
        m, u, w = tl.load(kn), tl.load(sums + n), tl.load(shifts + n)
        s, part = _score(s, q0, k0, 0, m, w, u, KE, s)
        if KE == 1:
            m = tl.load(kn + 1 // KE * T)
            u, w = tl.load(sums + 1 // KE * N + n), tl.load(shifts + 1 // KE * N + n)
        s, part = _score(s, q1, k1, 1, m, w, u, KE, part)
        if KE <= 2:
            m = tl.load(kn + 2 // KE * T)
            u, w = tl.load(sums + 2 // KE * N + n), tl.load(shifts + 2 // KE * N + n)
        s, part = _score(s, q2, k2, 2, m, w, u, KE, part)
        if KE == 1:
            m = tl.load(kn + 3 // KE * T)
            u, w = tl.load(sums + 3 // KE * N + n), tl.load(shifts + 3 // KE * N + n)
        s, part = _score(s, q3, k3, 3, m, w, u, KE, part)
        if K_PLANES == 8:
            if KE <= 4:
                m = tl.load(kn + 4 // KE * T)
                u, w = tl.load(sums + 4 // KE * N + n), tl.load(shifts + 4 // KE * N + n)
            s, part = _score(s, q4, k4, 4, m, w, u, KE, part)
            if KE == 1:
                m = tl.load(kn + 5 // KE * T)
                u, w = tl.load(sums + 5 // KE * N + n), tl.load(shifts + 5 // KE * N + n)
            s, part = _score(s, q5, k5, 5, m, w, u, KE, part)
            if KE <= 2:
                m = tl.load(kn + 6 // KE * T)
                u, w = tl.load(sums + 6 // KE * N + n), tl.load(shifts + 6 // KE * N + n)
            s, part = _score(s, q6, k6, 6, m, w, u, KE, part)
            if KE == 1:
                m = tl.load(kn + 7 // KE * T)
                u, w = tl.load(sums + 7 // KE * N + n), tl.load(shifts + 7 // KE * N + n)
            s, part = _score(s, q7, k7, 7, m, w, u, KE, part)
        if MASKED:
            seen = tl.load(mask + page * T + t) != 0
            s = tl.where(seen[:, None], s, -1e30)

        higher = tl.maximum(top, tl.max(s, 0) * factor)
        p = tl.exp2(s * factor[None, :] - higher[None, :])
        decay = tl.exp2(top - higher)
        top = higher
        total = total * decay + tl.sum(p, 0)
        v0, v1, v2, v3, v4, v5, v6, v7 = _planes(vw, vh, V_BITS, V_PLANES, ASM)
        w, t0, b0 = _weigh(p, tl.load(vn), t0, b0, ones, decay)
        o0 = tl.dot(v0, w, o0 * decay[None, :])
        if VE == 1:
            w, t1, b1 = _weigh(p, tl.load(vn + 1 // VE * T), t1, b1, ones, decay)
        o1 = tl.dot(v1, w, o1 * decay[None, :])
        if VE <= 2:
            w, t2, b2 = _weigh(p, tl.load(vn + 2 // VE * T), t2, b2, ones, decay)
        o2 = tl.dot(v2, w, o2 * decay[None, :])
        if VE == 1:
            w, t3, b3 = _weigh(p, tl.load(vn + 3 // VE * T), t3, b3, ones, decay)
        o3 = tl.dot(v3, w, o3 * decay[None, :])
        if V_PLANES == 8:
            if VE <= 4:
                w, t4, b4 = _weigh(p, tl.load(vn + 4 // VE * T), t4, b4, ones, decay)
            o4 = tl.dot(v4, w, o4 * decay[None, :])
            if VE == 1:
                w, t5, b5 = _weigh(p, tl.load(vn + 5 // VE * T), t5, b5, ones, decay)
            o5 = tl.dot(v5, w, o5 * decay[None, :])
            if VE <= 2:
                w, t6, b6 = _weigh(p, tl.load(vn + 6 // VE * T), t6, b6, ones, decay)
            o6 = tl.dot(v6, w, o6 * decay[None, :])
            if VE == 1:
                w, t7, b7 = _weigh(p, tl.load(vn + 7 // VE * T), t7, b7, ones, decay)
            o7 = tl.dot(v7, w, o7 * decay[None, :])

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
    tl.store(part_sum + n, total)


@triton.jit
def _windows(
    q, sink_k, sink_v, live_k, live_v, b, g,
    sink_tokens, live_tokens, sink_stride, live_stride, sink_row, live_row, mask, paged,
    part_out, part_top, part_sum, rows, new, scale,
    D: tl.constexpr, N: tl.constexpr, T: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Sink and live tokens, in the model's domain. *_stride: of a head, *_row: of a batch row."""
    n, t, d = tl.arange(0, N), tl.arange(0, T), tl.arange(0, D)
    dtype = live_k.dtype.element_ty
    turned = tl.load(q + n[None, :] * D + d[:, None], mask=n[None, :] < rows, other=0.0)
    turned = turned.to(dtype)  # q^T [D, N]
    # Row i of a group is token i % new of its head: it sees that many tokens less at the end.
    seen_by = live_tokens - new + 1 + n % new
    top = tl.full([N], -1e30, tl.float32)
    total = tl.zeros([N], tl.float32)
    out = tl.zeros([D, N], tl.float32)
    sink_blocks = (sink_tokens + T - 1) // T
    for i in tl.range(sink_blocks + (live_tokens + T - 1) // T, num_stages=1):
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
        s = tl.dot(k, turned, input_precision="ieee") * scale
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
        out = tl.dot(v, p.to(dtype), out * decay[None, :], input_precision="ieee")
    tl.store(part_out + n[None, :] * D + d[:, None], out, mask=n[None, :] < rows)
    tl.store(part_top + n, top)
    tl.store(part_sum + n, total)
