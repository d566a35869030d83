"""Bits by direction in Triton: decode attention, sealing and unsealing over `layout.FillLayout`.

Attention is that of `decode`, block by block: a block of 16 dims is a matrix [tokens, 16] of one width, and the loop
over blocks is unrolled, so that each has its shifts and masks as constants. Widths are constants of a kernel: layers
of equal widths share one.

A code of b bits becomes 1024 + gain * code, where it lies in its word. A token has one scale and no bias, so what
1024 and (2^b - 1) / 2 add to a score is one number per query, and to an output the sum of the weights times one number
per dim. Queries come divided by the gains (`launch` folds those into the matrix that turns them).
"""

from __future__ import annotations

import triton
import triton.language as tl

from cuda_track.kernels.chained import after, before
from cuda_track.kernels.codes import MAGIC, OFFSET
from cuda_track.kernels.decode import COUNTS, LANES, _capped, _on, _some, _windows
from cuda_track.kernels.encode import HALF_MAX, ROUNDS, _half, _turned

LEAST = tl.constexpr(16)  # dims of a block

# Two float16 at a time. Masks and shifts are operands: the same for both.
MASKED = tl.constexpr("lop3.b32 $0, $1, $2, 0x64006400, 0xea;")
DOWN = tl.constexpr("shr.b32 $0, $1, $2;")
# 3 bits: the low two lie in $1, the high one in $2 and moves by $3.
JOINED_UP = tl.constexpr("""{
    .reg .b32 t, u;
    shl.b32 t, $2, $3;
    lop3.b32 u, $1, $5, 0x64006400, 0xea;
    lop3.b32 $0, t, $7, u, 0xea;
}""")
JOINED_DOWN = tl.constexpr("""{
    .reg .b32 t, u;
    shr.b32 t, $2, $3;
    lop3.b32 u, $1, $5, 0x64006400, 0xea;
    lop3.b32 $0, t, $7, u, 0xea;
}""")


@triton.constexpr_function
def _of(table, i, k):
    """Number k of plane, or field, i."""
    return table[i][k]


@triton.constexpr_function
def _gain(planes, i):
    """What a code of block i counts where it lies in the mantissa of 1024."""
    return 2 ** (planes[i][2] % 8)


@triton.constexpr_function
def _middle(planes, i):
    """Half of the largest code of block i."""
    return (2 ** planes[i][0] - 1) / 2


@triton.constexpr_function
def _added(planes, i):
    """What 1024 and the middle add to gain * (code - middle)."""
    return OFFSET.value + 2 ** (planes[i][2] % 8) * (2 ** planes[i][0] - 1) / 2


@triton.constexpr_function
def _bits(fields):
    """Of a lane."""
    return fields[-1][0] + fields[-1][1]


@triton.constexpr_function
def _both_halves(bits):
    return bits * 0x10001


@triton.jit
def _down(words, BY: tl.constexpr, ASM: tl.constexpr):
    """Shift int16 words down; above what they had then lies what is not theirs."""
    if not ASM:
        return ((words.to(tl.int32) & 0xFFFF) >> BY).to(tl.int16)
    by = tl.full(words.shape, BY, tl.int32)
    return tl.inline_asm_elementwise(DOWN, "=r,r,r,r", [words, by], tl.int16, is_pure=True, pack=2)


@triton.jit
def _field(
    words, turn, T: tl.constexpr, PAGE: tl.constexpr, FIELDS: tl.constexpr, FIELD: tl.constexpr,
    KEYS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The words of one field of the tokens of a turn, int16 [T, 16] (keys) or [16, T]: its bits stand lowest, above
    them lies what is not theirs."""
    FIRST: tl.constexpr = _of(FIELDS, FIELD, 0)
    SIZE: tl.constexpr = _of(FIELDS, FIELD, 1)
    ROWS: tl.constexpr = T * SIZE // 16  # of a turn
    j, row = tl.arange(0, LEAST), turn * ROWS + tl.arange(0, ROWS)
    if KEYS:
        word = tl.load(words + PAGE * FIRST + row[:, None] * LEAST + j[None, :])
    else:
        word = tl.load(words + PAGE * FIRST + j[:, None] * (PAGE * SIZE // 16) + row[None, :])
    # Tokens that share a word lie whole tiles of a matrix unit apart: all of this is a choice of registers.
    if SIZE <= 8:
        word = tl.join(word, _down(word, 8, ASM))
    if SIZE <= 4:
        word = tl.join(word, _down(word, 4, ASM))
    if SIZE <= 2:
        word = tl.join(word, _down(word, 2, ASM))
    if SIZE < 16:
        word = tl.reshape(word, [word.shape[0], word.shape[1], 16 // SIZE])
        word = tl.permute(word, [2, 0, 1] if KEYS else [0, 2, 1])
        word = tl.reshape(word, [T, LEAST] if KEYS else [LEAST, T])
    return word


@triton.jit
def _fields(
    words, turn, T: tl.constexpr, PAGE: tl.constexpr, FIELDS: tl.constexpr,
    KEYS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A tuple of `_field`."""
    out = ()
    for k in tl.static_range(len(FIELDS)):
        out = out + (_field(words, turn, T, PAGE, FIELDS, k, KEYS, ASM),)
    return out


@triton.jit
def _high(words, ASM: tl.constexpr):
    """A tuple of words, down by 8 bits."""
    out = ()
    for k in tl.static_range(len(words)):
        out = out + (_down(words[k], 8, ASM),)
    return out


@triton.jit
def _codes(words, PLANES: tl.constexpr, BLOCK: tl.constexpr):
    """The codes of a block, int32."""
    BITS: tl.constexpr = _of(PLANES, BLOCK, 0)
    code = words[_of(PLANES, BLOCK, 1)].to(tl.int32) >> _of(PLANES, BLOCK, 2)
    if BITS == 3:
        top = words[_of(PLANES, BLOCK, 3)].to(tl.int32) >> _of(PLANES, BLOCK, 4)
        return (code & 3) | (top & 1) << 2
    return code & ((1 << BITS) - 1)


@triton.jit
def _plane(words, high, PLANES: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr):
    """1024 + gain * code of a block, float16. high: of the same words."""
    BITS: tl.constexpr = _of(PLANES, BLOCK, 0)
    AT: tl.constexpr = _of(PLANES, BLOCK, 2) % 8
    if not ASM:
        code = _codes(words, PLANES, BLOCK) << AT
        return (code | MAGIC).to(tl.int16).to(tl.float16, bitcast=True)
    if _of(PLANES, BLOCK, 2) < 8:
        word = words[_of(PLANES, BLOCK, 1)]
    else:
        word = high[_of(PLANES, BLOCK, 1)]
    if BITS == 3:
        BY: tl.constexpr = AT + 2 - _of(PLANES, BLOCK, 4)
        low = tl.full(word.shape, _both_halves(3 << AT), tl.int32)
        top = tl.full(word.shape, _both_halves(4 << AT), tl.int32)
        by = tl.full(word.shape, BY if BY >= 0 else -BY, tl.int32)
        return tl.inline_asm_elementwise(
            JOINED_UP if BY >= 0 else JOINED_DOWN,
            "=r,r,r,r,r,r,r,r,r",
            [word, words[_of(PLANES, BLOCK, 3)], by, low, top],
            tl.float16,
            is_pure=True,
            pack=2,
        )
    mask = tl.full(word.shape, _both_halves(((1 << BITS) - 1) << AT), tl.int32)
    return tl.inline_asm_elementwise(
        MASKED, "=r,r,r,r", [word, mask], tl.float16, is_pure=True, pack=2
    )


@triton.jit(do_not_specialize=COUNTS)
def fill_attend_kernel(
    q, factors, plain,  # [B, G, N, D] float16, [B, G, N], [B, H, L, D]
    k_words, k_numbers, v_words, v_numbers,
    table, pages,  # [B, most] int32, [B] int32
    sink_k, sink_v, live_k, live_v,  # windows, [B, G, T, D]
    sink_tokens, live_tokens, sink_stride, live_stride, sink_row, live_row,
    mask, mask_row,  # uint8 [B, tokens], or nothing
    part_out, part_top, part_sum,  # [B, G, S, N, D], [B, G, S, N] twice, S of splits and windows
    most, splits, rows, new, plain_scale, cap,
    D: tl.constexpr, N: tl.constexpr, T: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr,
    K_PLANES: tl.constexpr, K_FIELDS: tl.constexpr, V_PLANES: tl.constexpr, V_FIELDS: tl.constexpr,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
    CHAINED: tl.constexpr, EARLY: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """As `decode.attend_kernel`. *_PLANES, *_FIELDS: of `FillLayout`. D: dims of a head, as which queries and partial
    outputs lie, zeros behind the stored ones."""
    split, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = b.to(tl.int64) * tl.num_programs(1) + g
    at = (head * tl.num_programs(0) + split) * N
    after(CHAINED)
    before(CHAINED and EARLY)
    if split >= splits:
        _windows(
            split - splits, tl.num_programs(0) - splits,
            plain + head * rows * D, sink_k, sink_v, live_k, live_v, b, g,
            sink_tokens, live_tokens, sink_stride, live_stride, sink_row, live_row,
            mask + b * mask_row, tl.load(pages + b) * PAGE,
            part_out + at * D, part_top + at, part_sum + at,
            rows, new, plain_scale, cap, D, N, WINDOW, MASKED, CAPPED, WIDE,
        )  # fmt: skip
    else:
        _pages(
            q + head * N * D, factors + head * N, k_words, k_numbers, v_words, v_numbers,
            table + b * most, tl.load(pages + b), split, splits, g, tl.num_programs(1),
            mask + b * mask_row + sink_tokens, part_out + at * D, part_top + at, part_sum + at, rows, cap,
            D, N, T, PAGE, K_PLANES, K_FIELDS, V_PLANES, V_FIELDS, MASKED, CAPPED, ASM, STAGES,
        )  # fmt: skip
    before(CHAINED and not EARLY)


@triton.jit
def _pages(
    q, factors, k_words, k_numbers, v_words, v_numbers,
    table, pages, split, splits, g, heads, mask, part_out, part_top, part_sum, rows, cap,
    D: tl.constexpr, N: tl.constexpr, T: tl.constexpr, PAGE: tl.constexpr,
    K_PLANES: tl.constexpr, K_FIELDS: tl.constexpr, V_PLANES: tl.constexpr, V_FIELDS: tl.constexpr,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    K_SIZE: tl.constexpr = PAGE * _bits(K_FIELDS)  # words of a page
    V_SIZE: tl.constexpr = PAGE * _bits(V_FIELDS)
    n, j = tl.arange(0, N), tl.arange(0, LEAST)
    turned, shift = (), tl.zeros([LEAST, N], tl.float32)
    for i in tl.static_range(len(K_PLANES)):
        x = tl.load(q + n[None, :] * D + (j + i * LEAST)[:, None])
        shift += x.to(tl.float32) * _added(K_PLANES, i)
        turned = turned + (x,)
    shift = tl.sum(shift, 0)
    factor = tl.load(factors + n)
    top = tl.full([N], -float("inf"), tl.float32)
    total = tl.zeros([LANES, N], tl.float32)
    weight = tl.zeros([LEAST, N], tl.float32)  # the sum of rounded weights, every row the same
    out = ()
    for _i in tl.static_range(len(V_PLANES)):
        out = out + (tl.zeros([LEAST, N], tl.float32),)
    ones = tl.full([LEAST, T], 1.0, tl.float16)
    first = (split.to(tl.int64) * pages // splits).to(tl.int32)
    last = ((split.to(tl.int64) + 1) * pages // splits).to(tl.int32)
    for page in tl.range(first, last, num_stages=STAGES):
        place = tl.load(table + page).to(tl.int64) * heads + g
        for turn in tl.static_range(PAGE // T):
            t = tl.arange(0, T)
            kw = _fields(k_words + place * K_SIZE, turn, T, PAGE, K_FIELDS, True, ASM)
            vw = _fields(v_words + place * V_SIZE, turn, T, PAGE, V_FIELDS, False, ASM)
            k_scale = tl.load(k_numbers + place * PAGE + turn * T + t).to(tl.float32)
            v_scale = tl.load(v_numbers + place * PAGE + turn * T + t).to(tl.float32)

            high = _high(kw, ASM)
            s = tl.zeros([T, N], tl.float32) - shift[None, :]
            for i in tl.static_range(len(K_PLANES)):
                s = tl.dot(_plane(kw, high, K_PLANES, i, ASM), turned[i], s)
            s = s * k_scale[:, None]
            by = factor
            if CAPPED:
                s, by = _capped(s * factor[None, :], cap), tl.full([N], 1.0, tl.float32)
            if MASKED:
                seen = tl.load(mask + page * PAGE + turn * T + t) != 0
                s = tl.where(seen[:, None], s, -1e30)

            higher = tl.maximum(top, tl.max(s, 0) * by)
            p = tl.exp2(s * by[None, :] - higher[None, :])
            decay = tl.exp2(top - higher)
            top = higher
            total = total * decay[None, :] + _some(p)
            weighed = (p * v_scale[:, None]).to(tl.float16)
            weight = _on(weight, decay, ones, weighed)
            high = _high(vw, ASM)
            new = ()
            for i in tl.static_range(len(V_PLANES)):
                plane = _plane(vw, high, V_PLANES, i, ASM)
                new = new + (_on(out[i], decay, plane, weighed),)
            out = new

    weight = tl.sum(weight, 0) / LEAST
    for i in tl.static_range(D // LEAST):
        if i < len(V_PLANES):
            x = (out[i] - weight[None, :] * _added(V_PLANES, i)) / _gain(V_PLANES, i)
        else:
            x = tl.zeros([LEAST, N], tl.float32)
        at = part_out + n[None, :] * D + (j + i * LEAST)[:, None]
        tl.store(at, x, mask=(n < rows)[None, :])
    tl.store(part_top + n, top)
    tl.store(part_sum + n, tl.sum(total, 0))


@triton.jit(do_not_specialize=["pages"])
def fill_seal_kernel(
    x, down, words, numbers, places, dims, pieces,  # places: [B, pages] int64, in the pool
    x_row, x_head, down_head, pages,
    D: tl.constexpr, R: tl.constexpr, T: tl.constexpr, TURN: tl.constexpr, PAGE: tl.constexpr,
    FIELDS: tl.constexpr, KEYS: tl.constexpr, TURNED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tokens / T, G, B). x: [B, G, tokens, D]; row and head: its strides. down: [PARTS or 1, D, D], zeros behind
    the R stored dims. dims: float32 [3, D], steps, gains and half of the largest code. pieces: int32
    [fields, 4, D / 16], a mask and a shift for the low bits of a block in each field, the same for bit 2."""
    block, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t, r, i = tl.arange(0, T), tl.arange(0, D), tl.arange(0, D // LEAST)
    first = block * T
    source = x + b.to(tl.int64) * x_row + g * x_head + first.to(tl.int64) * D
    if TURNED:
        y = _turned(source, down + g * down_head, t, D, D, PARTS, BLOCK)
    else:
        y = tl.load(source + t[:, None] * D + r[None, :]).to(tl.float32)
    step, gain, middle = tl.load(dims + r), tl.load(dims + D + r), tl.load(dims + 2 * D + r)
    sized = y * step[None, :]
    scale = _half(tl.sqrt_rn(tl.sum(sized * sized, 1) / R), HALF_MAX)
    size = scale.to(tl.float32)
    # One division per token: a code at a boundary may round to the other side.
    inverse = 1.0 / tl.where(size > 0, size, 1.0)
    code = (y * gain[None, :]) * inverse[:, None] + middle[None, :]
    code = tl.minimum(tl.maximum(code, 0.0), 2 * middle[None, :]) + ROUNDS
    code = tl.reshape(code.to(tl.int32, bitcast=True) & 255, [T, D // LEAST, LEAST])

    place = tl.load(places + b * pages + (first + t) // PAGE) * tl.num_programs(1) + g  # [T]
    tl.store(numbers + place * PAGE + (first + t) % PAGE, scale)
    for k in tl.static_range(len(FIELDS)):
        at = pieces + k * (D // LEAST * 4) + i
        low, low_at = tl.load(at)[None, :, None], tl.load(at + D // LEAST)[None, :, None]
        top, top_at = (
            tl.load(at + D // LEAST * 2)[None, :, None],
            tl.load(at + D // LEAST * 3)[None, :, None],
        )
        word = tl.sum((code & low) << low_at | ((code >> 2) & top) << top_at, 1)  # [T, 16]
        _store_field(words, word, places + b * pages, g, first, T, TURN, PAGE, FIELDS, k, KEYS)


@triton.jit
def _store_field(
    words, word, places, g, first, T: tl.constexpr, TURN: tl.constexpr, PAGE: tl.constexpr,
    FIELDS: tl.constexpr, FIELD: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Store the bits of a field, int32 [T, 16], of tokens from `first` on."""
    FIRST: tl.constexpr = _of(FIELDS, FIELD, 0)
    SIZE: tl.constexpr = _of(FIELDS, FIELD, 1)
    SHARED: tl.constexpr = 16 // SIZE  # tokens of a word
    if SHARED > 1:
        word = tl.reshape(word, [T // TURN, SHARED, TURN // SHARED, LEAST])
        word = tl.sum(word << (tl.arange(0, SHARED) * SIZE)[None, :, None, None], 1)
        word = tl.reshape(word, [T // SHARED, LEAST])
    ROWS: tl.constexpr = PAGE // SHARED  # of a page
    j, row = tl.arange(0, LEAST), first // SHARED + tl.arange(0, T // SHARED)
    place = tl.load(places + row // ROWS) * tl.num_programs(1) + g
    base = place * (PAGE * _bits(FIELDS)) + PAGE * FIRST
    if KEYS:
        at = (base + row % ROWS * LEAST)[:, None] + j[None, :]
    else:
        at = (base + row % ROWS)[:, None] + j[None, :] * ROWS
    tl.store(words + at, word.to(tl.int16))


@triton.jit(do_not_specialize=["most", "start"])
def fill_unseal_kernel(
    words, numbers, table, pages, out,  # of one side; [B, most], [B]; [B, G, tokens, R]
    most, start, out_row, out_head,
    T: tl.constexpr, PAGE: tl.constexpr, PLANES: tl.constexpr, FIELDS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Grid (most * PAGE / T, G, B): a turn of T tokens of a page, in the stored domain, written from `start` on."""
    block, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    page, turn = block // (PAGE // T), block % (PAGE // T)
    if page < tl.load(pages + b):
        R: tl.constexpr = len(PLANES) * LEAST
        t, j = tl.arange(0, T), tl.arange(0, LEAST)
        place = tl.load(table + b * most + page).to(tl.int64) * tl.num_programs(1) + g
        found = _fields(words + place * (PAGE * _bits(FIELDS)), turn, T, PAGE, FIELDS, KEYS, False)
        scale = tl.load(numbers + place * PAGE + turn * T + t).to(tl.float32)
        tokens = start + block.to(tl.int64) * T + t
        base = b.to(tl.int64) * out_row + g.to(tl.int64) * out_head
        for i in tl.static_range(len(PLANES)):
            x = _codes(found, PLANES, i).to(tl.float32) - _middle(PLANES, i)
            if KEYS:
                x, at = x * scale[:, None], tokens[:, None] * R + (j + i * LEAST)[None, :]
            else:
                x, at = x * scale[None, :], tokens[None, :] * R + (j + i * LEAST)[:, None]
            if out.dtype.element_ty == tl.float16:
                x = tl.minimum(tl.maximum(x, -HALF_MAX), HALF_MAX)
            tl.store(out + base + at, x.to(out.dtype.element_ty))
