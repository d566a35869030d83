"""Mixed bits in Triton: decode attention, encoding and decoding of pages as `blocks.BlockLayout` orders them.

Attention is that of `decode`, by blocks of 16 dims and, of 64 tokens, four times 16. A code of b bits moves to the top
of a float16's mantissa: 1 + code / 2^b, one shift and one AND for two neighbours. A token has one scale and no bias, so
what the 1, and the middle code, add to a score is one number per query, and to an output the sum of the weights times
one number per dim. Both are about as large as what they are taken from: no bits are lost. The factors 2^b are in the
matrices that queries and outputs are multiplied with (`blocks.matrices`).

Widths are constants of attention: a load, a shift and a mask per block, all of them unrolled. Encoding and decoding
read them from tables: one kernel for all layers.
"""

# Kernels are in Triton's language, which its stubs do not make Python: constants are not numbers, loops no iterables.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false, reportRedeclaration=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from cuda_track.kernels import blocks
from cuda_track.kernels.chained import launch_next, wait_for_previous
from cuda_track.kernels.codes import at_record, halves
from cuda_track.kernels.decode import COUNTS, LANES, _capped, _lane_sums, _windows
from cuda_track.kernels.encode import HALF_MAX, ROUNDS, _above, _below, _half, _transformed

DIMS = tl.constexpr(blocks.DIMS)  # of a block
ROWS = tl.constexpr(blocks.ROWS)  # of a tile
SHARED = tl.constexpr(blocks.SHARED)  # tokens of a row, 16 apart
STEP = tl.constexpr(blocks.STEP)  # tokens of a tile
SIZE = tl.constexpr(blocks.ROWS * blocks.DIMS)  # numbers of a tile
ONE = tl.constexpr(0x3C00)
MANTISSA = tl.constexpr(10)


class BlockConstants(NamedTuple):
    """Where the codes of one side are: of each block its bits, its first bit and the first of its high ones
    (`BlockLayout.places`). TILES: whole ones. ODD: half a tile follows."""

    BITS: tuple[int, ...]
    LOWS: tuple[int, ...]
    TOPS: tuple[int, ...]
    TILES: int
    ODD: bool


def block_constants(at: blocks.BlockLayout) -> BlockConstants:
    """Return the constants of a side."""
    bits, lows, tops = zip(*at.places, strict=True)
    return BlockConstants(bits, lows, tops, at.tiles, at.odd)


class MixedConstants(NamedTuple):
    """What `attend_mixed_kernel` is compiled for: as `decode.Constants`. R: dims of a head, with which queries and
    partial outputs lie, zeros behind the stored ones."""

    K: BlockConstants
    V: BlockConstants
    R: int
    N: int
    WINDOW: int
    PAGE: int
    RECORD: int
    MASKED: bool
    CAPPED: bool
    ASM: bool
    STAGES: int
    WIDE: bool


@triton.constexpr_function
def _of(constants, keys, name, i=None):
    """Return number `name` of a side, or number i of its table `name`."""
    # Kernels of Triton 3.6 cannot take a side out of the constants and pass it on: it holds tuples itself.
    found = getattr(constants.K if keys else constants.V, name)
    return found if i is None else found[i]


@triton.constexpr_function
def _count(constants, keys):
    """Return the number of blocks of a side."""
    return len((constants.K if keys else constants.V).BITS)


@triton.constexpr_function
def _second(bits, low, top):
    """Return the other tile of a block: of the high bits of 3, of the last two codes of 8; else the first."""
    return top // 16 if bits == 3 else low // 16 + 1 if bits == 8 else low // 16


@triton.constexpr_function
def _middle(bits):
    """Return half of the largest code where codes lie: 1 + ((2^b - 1) / 2) / 2^b."""
    return 1.5 - 0.5**bits / 2


@triton.constexpr_function
def _ptx(bits, low, top):
    """Return PTX by which two neighbours $4, and $5 of the other tile, become 1 + code / 2^b of four tokens, $0 to $3.

    Bits that cross from one neighbour to the other lie where the mask has none."""
    out = ["{", ".reg .b32 t, u;"]
    for k in range(4):
        pieces = [("$4", low % 16 + k * bits, bits, 10 - bits)]
        if bits == 8:
            pieces = [(f"${4 + k // 2}", k % 2 * 8, 8, 2)]
        elif bits == 3:
            pieces = [("$4", low % 16 + k * 2, 2, 7), ("$5", top % 16 + k, 1, 9)]
        other = "0x3c003c00"
        for number, piece in enumerate(pieces, 1):
            word, start, size, to = piece
            moved = word
            if start != to:
                move = f"shr.b32 t, {word}, {start - to}"
                out.append(f"{move if start > to else f'shl.b32 t, {word}, {to - start}'};")
                moved = "t"
            into = f"${k}" if number == len(pieces) else "u"
            mask = (((1 << size) - 1) << to) * 0x10001
            out.append(f"lop3.b32 {into}, {moved}, {mask:#x}, {other}, 0xea;")
            other = "u"
    return "\n".join([*out, "}"])


@triton.jit
def _code(word, other, BITS: tl.constexpr, LOW: tl.constexpr, TOP: tl.constexpr, k: tl.constexpr):
    """Return 1 + code / 2^b of token k of a row, float16."""
    if BITS == 8:
        code = ((word if k < 2 else other) >> (k % 2 * 8)) & 255
    elif BITS == 3:
        code = ((word >> (LOW % 16 + k * 2)) & 3) | (((other >> (TOP % 16 + k)) & 1) << 2)
    else:
        code = (word >> (LOW % 16 + k * BITS)) & ((1 << BITS) - 1)
    return (code << (MANTISSA - BITS) | ONE).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _block(tiles, C: tl.constexpr, KEYS: tl.constexpr, i: tl.constexpr):
    """Return 1 + code / 2^b of block i, four matrices of 16 tokens, float16."""
    BITS: tl.constexpr = _of(C, KEYS, "BITS", i)
    LOW: tl.constexpr = _of(C, KEYS, "LOWS", i)
    TOP: tl.constexpr = _of(C, KEYS, "TOPS", i)
    word, other = tiles[LOW // 16], tiles[_second(BITS, LOW, TOP)]
    if C.ASM:
        return tl.inline_asm_elementwise(
            _ptx(BITS, LOW, TOP),
            "=r,=r,=r,=r,r,r",
            [word, other],
            (tl.float16,) * 4,
            is_pure=True,
            pack=2,
        )
    wide, more = word.to(tl.int32), other.to(tl.int32)
    out = ()
    for k in tl.static_range(SHARED):
        out += (_code(wide, more, BITS, LOW, TOP, k),)
    return out


@triton.jit
def _tiles(words, odd, place, step, C: tl.constexpr, KEYS: tl.constexpr):
    """Load the tiles of a step, int16 [16, 16]; above the half one lies what is no code."""
    TILES: tl.constexpr = _of(C, KEYS, "TILES")
    at = tl.arange(0, ROWS)[:, None] * DIMS + tl.arange(0, DIMS)[None, :]
    out = ()
    for i in tl.static_range(TILES):
        out += (tl.load(at_record(words, place, C.RECORD) + (step * TILES + i) * SIZE + at),)
    if _of(C, KEYS, "ODD"):
        out += (tl.load(at_record(odd, place, C.RECORD) + step * SIZE + at).to(tl.int16),)
    return out


@triton.jit
def _scales(numbers, step):
    """Load the scales of the tokens of a step, float32, four times [16]."""
    t = tl.arange(0, ROWS)
    a, b = halves(tl.load(numbers + step * (2 * ROWS) + t))
    c, d = halves(tl.load(numbers + step * (2 * ROWS) + ROWS + t))
    return a, b, c, d


@triton.jit(do_not_specialize=COUNTS)
def attend_mixed_kernel(
    q, factors, plain,  # [B, G, N, R] float16, [B, G, N], [B, H, L, D]
    k_words, k_odd, k_numbers, v_words, v_odd, v_numbers,
    table, pages,  # [B, row_pages] int32, [B] int32
    sink_k, sink_v, recent_k, recent_v,  # windows, [B, G, T, D]
    sink_tokens, recent_tokens, sink_stride, recent_stride, sink_row, recent_row,
    mask, mask_row,  # uint8 [B, tokens], or nothing
    part_out, part_top, part_sum,  # [B, G, S, N, R], [B, G, S, N] twice, S of splits and windows
    row_pages, splits, rows, new, plain_scale, cap,
    C: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """As `decode.attend_kernel`. C: `MixedConstants`."""
    R: tl.constexpr = C.R
    N: tl.constexpr = C.N
    split, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = b.to(tl.int64) * tl.num_programs(1) + g
    at = (head * tl.num_programs(0) + split) * N
    wait_for_previous(CHAINED)
    if split >= splits:
        _windows(
            split - splits, tl.num_programs(0) - splits,
            plain + head * rows * R, sink_k, sink_v, recent_k, recent_v, b, g,
            sink_tokens, recent_tokens, sink_stride, recent_stride, sink_row, recent_row,
            mask + b * mask_row, tl.load(pages + b) * C.PAGE,
            part_out + at * R, part_top + at, part_sum + at, rows, new, plain_scale, cap, C,
        )  # fmt: skip
    else:
        pages_of_mixed_bits(
            q + head * N * R, factors + head * N, k_words, k_odd, k_numbers, v_words, v_odd, v_numbers,
            table + b * row_pages, tl.load(pages + b), split, splits, g, tl.num_programs(1),
            mask + b * mask_row + sink_tokens, part_out + at * R, part_top + at, part_sum + at, rows, cap, C,
        )  # fmt: skip
    launch_next(CHAINED)


@triton.jit
def pages_of_mixed_bits(
    queries, factors, k_words, k_odd, k_numbers, v_words, v_odd, v_numbers,
    table, pages, split, splits, g, heads, mask, part_out, part_top, part_sum, rows, cap,
    C: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = C.R
    N: tl.constexpr = C.N
    STEPS: tl.constexpr = C.PAGE // STEP
    K_BLOCKS: tl.constexpr = _count(C, True)
    V_BLOCKS: tl.constexpr = _count(C, False)
    n, j = tl.arange(0, N), tl.arange(0, DIMS)
    q, shift = (), tl.zeros([DIMS, N], tl.float32)  # q^T of each block [16, N]
    for i in tl.static_range(K_BLOCKS):
        q += (tl.load(queries + n[None, :] * R + i * DIMS + j[:, None]),)
        shift += q[i].to(tl.float32) * _middle(_of(C, True, "BITS", i))
    shift = tl.sum(shift, 0)
    factor = tl.load(factors + n)
    top = tl.full([N], -float("inf"), tl.float32)
    total = tl.zeros([LANES, N], tl.float32)
    weight = tl.zeros([ROWS, N], tl.float32)  # the sum of rounded weights, every row the same
    out = ()
    for _ in tl.static_range(V_BLOCKS):
        out += (tl.zeros([DIMS, N], tl.float32),)
    ones = tl.full([ROWS, ROWS], 1.0, tl.float16)
    first = (split.to(tl.int64) * pages // splits).to(tl.int32)
    last = ((split.to(tl.int64) + 1) * pages // splits).to(tl.int32)
    for page in tl.range(first, last, num_stages=C.STAGES):
        place = tl.load(table + page).to(tl.int64) * heads + g
        for step in tl.static_range(STEPS):
            kw = _tiles(k_words, k_odd, place, step, C, True)
            vw = _tiles(v_words, v_odd, place, step, C, False)
            k_scales = _scales(at_record(k_numbers, place, C.RECORD), step)
            v_scales = _scales(at_record(v_numbers, place, C.RECORD), step)

            s = (tl.zeros([ROWS, N], tl.float32) - shift[None, :],) * SHARED
            for i in tl.static_range(K_BLOCKS):
                k = _block(kw, C, True, i)
                new_s = ()
                for m in tl.static_range(SHARED):
                    new_s += (tl.dot(k[m], q[i], s[m]),)
                s = new_s
            scores, peak = (), tl.full([ROWS, N], -float("inf"), tl.float32)
            for m in tl.static_range(SHARED):
                x = s[m] * k_scales[m][:, None] * factor[None, :]
                if C.CAPPED:
                    x = _capped(x, cap)
                if C.MASKED:
                    token = page * C.PAGE + step * STEP + m * ROWS + tl.arange(0, ROWS)
                    visible = tl.load(mask + token) != 0
                    x = tl.where(visible[:, None], x, -1e30)
                peak = tl.maximum(peak, x)
                scores += (x,)

            higher = tl.maximum(top, tl.max(peak, 0))
            decay = tl.exp2(top - higher)
            top = higher
            total = total * decay[None, :]
            weights, part = (), tl.zeros([ROWS, N], tl.float32)
            for m in tl.static_range(SHARED):
                p = tl.exp2(scores[m] - higher[None, :])
                total += _lane_sums(p)
                weights += ((p * v_scales[m][:, None]).to(tl.float16),)
                part = tl.dot(ones, weights[m], part)
            weight = weight * decay[None, :] + part
            new_out = ()
            for i in tl.static_range(V_BLOCKS):
                v = _block(vw, C, False, i)
                part = tl.dot(v[0], weights[0])
                for m in tl.static_range(1, SHARED):
                    part = tl.dot(v[m], weights[m], part)
                # As `decode._on`: the sum of a step starts at 0, and `fma` keeps it apart from the long one.
                fading = tl.broadcast_to(decay[None, :], part.shape)
                new_out += (tl.fma(out[i], fading, part),)
            out = new_out

    weight = tl.sum(weight, 0) / ROWS
    for i in tl.static_range(R // DIMS):
        if i < V_BLOCKS:
            x = out[i] - weight[None, :] * _middle(_of(C, False, "BITS", i))
        else:  # dims that are not stored
            x = tl.zeros([DIMS, N], tl.float32)
        at = part_out + n[None, :] * R + i * DIMS + j[:, None]
        tl.store(at, x, mask=n[None, :] < rows)
    tl.store(part_top + n, top)
    tl.store(part_sum + n, tl.sum(total, 0))


@triton.jit
def _half_tile(codes, recipe, T: tl.constexpr, BLOCKS: tl.constexpr):
    """Return 8 bits of each row and dim, int32 [T / 64, 16, 16], from codes [T / 64, 4, 16, BLOCKS, 16]. recipe: of
    `blocks.recipe`, at this half of a tile."""
    k, i = tl.arange(0, SHARED), tl.arange(0, BLOCKS)
    say = tl.load(recipe + k[:, None] * BLOCKS + i[None, :])
    say = tl.reshape(say, [1, SHARED, 1, BLOCKS, 1])
    bits = ((codes >> ((say >> 8) & 255)) & (say >> 16)) << (say & 255)
    return tl.sum(tl.sum(bits, 3), 1)


@triton.jit(do_not_specialize=["pages", "stored", "half_tiles"])
def quantize_mixed_kernel(
    x, down, words, odd, numbers, places,  # places: [B, pages] int64, in the pool
    dims, recipe,  # `blocks.numbers_of_dims`, `blocks.recipe`
    x_row, x_head, down_head, pages, record, stored, half_tiles,
    D: tl.constexpr, T: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    TURNED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tokens / T, G, B). x: [B, G, tokens, D]; row and head: its strides. down: [PARTS or 1, D, D], zeros behind
    the `stored` dims. half_tiles: of a step."""
    block, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = block * T
    source = x + b.to(tl.int64) * x_row + g.to(tl.int64) * x_head + first.to(tl.int64) * D
    token = first + tl.arange(0, T // STEP) * STEP
    place = tl.load(places + b * pages + token // PAGE) * tl.num_programs(1) + g
    quantize_mixed_rows(
        source + tl.arange(0, T) * D, down + g * down_head, words, odd, numbers, dims, recipe,
        place, token % PAGE // STEP, record, stored, half_tiles, D, KEYS, TURNED, PARTS, BLOCK,
    )  # fmt: skip


@triton.jit
def quantize_mixed_rows(
    rows, down, words, odd, numbers, dims, recipe, place, inside_page, record, stored, half_tiles,
    D: tl.constexpr, KEYS: tl.constexpr, TURNED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize T tokens. rows: pointers to them [T]. place, inside_page: the record of each 64 of them, and which 64
    of its page they are [T / 64]."""
    T: tl.constexpr = rows.shape[0]
    BLOCKS: tl.constexpr = D // DIMS
    STEPS: tl.constexpr = T // STEP
    r = tl.arange(0, D)
    if TURNED:
        y = _transformed(rows, down, D, D, PARTS, BLOCK)
    else:
        y = tl.load(rows[:, None] + r[None, :]).to(tl.float32)
    size, gain, middle = tl.load(dims + r), tl.load(dims + D + r), tl.load(dims + 2 * D + r)
    sized = y * size[None, :]
    mean = tl.sum(sized * sized, 1) / (tl.zeros([T], tl.float32) + stored)
    scale = _half(tl.sqrt_rn(mean), HALF_MAX)
    width = scale.to(tl.float32)
    # One division per token: a code at a boundary may round to the other side.
    inverse = 1.0 / tl.where(width > 0, width, 1.0)
    code = (y * gain[None, :]) * inverse[:, None] + middle[None, :]
    code = tl.minimum(tl.maximum(code, 0.0), 2 * middle[None, :]) + ROUNDS
    code = code.to(tl.int32, bitcast=True) & 255
    code = tl.reshape(code, [STEPS, SHARED, ROWS, BLOCKS, DIMS])

    row, j = tl.arange(0, ROWS)[:, None], tl.arange(0, DIMS)[None, :]
    inside = row * DIMS + j if KEYS else row + j * ROWS
    at = inside[None, :, :]
    tiles = half_tiles // 2
    for i in range(tiles):
        low = _half_tile(code, recipe + 2 * i * (SHARED * BLOCKS), T, BLOCKS)
        high = _half_tile(code, recipe + (2 * i + 1) * (SHARED * BLOCKS), T, BLOCKS)
        start = at_record(words, place, record) + (inside_page * tiles + i) * SIZE
        tl.store(start[:, None, None] + at, (low | high << 8).to(tl.int16))
    if half_tiles % 2 == 1:
        low = _half_tile(code, recipe + 2 * tiles * (SHARED * BLOCKS), T, BLOCKS)
        start = at_record(odd, place, record) + inside_page * SIZE
        tl.store(start[:, None, None] + at, low.to(tl.int8))
    pair = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    pair = tl.reshape(pair, [STEPS, 2, 2, ROWS]) << (tl.arange(0, 2) * 16)[None, None, :, None]
    number = tl.arange(0, 2)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    start = at_record(numbers, place, record) + inside_page * (2 * ROWS)
    tl.store(start[:, None, None] + number[None, :, :], tl.sum(pair, 2))


@triton.jit
def _bits(words, odd, at, bit, tiles):
    """Load what a step holds from bit `bit` [4, 1, 1] on, int32 [4, 16, 16]; above what was asked for lies more."""
    tile = bit // 16 + 0 * at
    whole = tl.load(words + tile * SIZE + at, mask=tile < tiles, other=0)
    half = tl.load(odd + at + 0 * tile, mask=tile >= tiles, other=0)
    return (whole.to(tl.int32) | half.to(tl.int32)) >> (bit % 16)


@triton.jit(do_not_specialize=["row_pages", "start", "blocks", "tiles"])
def dequantize_mixed_kernel(
    words, odd, numbers, table, pages, out,  # of one side; [B, row_pages], [B]; [B, G, tokens, R]
    block_places,  # [R / 16, 3], `blocks.places_of`
    row_pages, start, out_row, out_head, record, blocks, tiles,
    PAGE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Grid (row_pages * PAGE / 64, G, B): 64 tokens of a page, written from `start` on. tiles: whole ones."""
    step, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    STEPS: tl.constexpr = PAGE // STEP
    page = step // STEPS
    if page < tl.load(pages + b):
        place = tl.load(table + b * row_pages + page).to(tl.int64) * tl.num_programs(1) + g
        inside = step % STEPS
        words = at_record(words, place, record) + inside * tiles * SIZE
        odd = at_record(odd, place, record) + inside * SIZE
        numbers = at_record(numbers, place, record) + inside * (2 * ROWS)
        k, r, j = tl.arange(0, SHARED), tl.arange(0, ROWS), tl.arange(0, DIMS)
        k, r, j = k[:, None, None], r[None, :, None], j[None, None, :]
        at = r * DIMS + j if KEYS else r + j * ROWS
        pair = tl.load(numbers + k // 2 * ROWS + r)
        scale = ((pair >> (k % 2 * 16)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        scale = scale.to(tl.float32)  # [4, 16, 1]
        token = start + step.to(tl.int64) * STEP + k * ROWS + r
        to = (
            out + b.to(tl.int64) * out_row + g.to(tl.int64) * out_head + token * (blocks * DIMS) + j
        )
        for i in range(blocks):
            bits = tl.load(block_places + 3 * i)
            low, top = tl.load(block_places + 3 * i + 1), tl.load(block_places + 3 * i + 2)
            size = tl.where(bits == 3, 2, bits)
            code = _bits(words, odd, at, low + k * size, tiles) & ((1 << size) - 1)
            high = _bits(words, odd, at, tl.maximum(top, 0) + k, tiles) & 1
            code = tl.where(bits == 3, code | high << 2, code)
            x = (code.to(tl.float32) - ((1 << bits) - 1).to(tl.float32) * 0.5) * scale
            if out.dtype.element_ty == tl.float16:
                x = _below(_above(x, -HALF_MAX), HALF_MAX)
            tl.store(to + i * DIMS, x.to(out.dtype.element_ty))
