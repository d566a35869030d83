"""Triton kernels over vLLM's blocks: write new tokens and the pages that they fill, attend to codes and exact tokens.

All that a step changes (lengths, tables) is read on the device, and grids depend on the sizes of the batch alone, so
that a CUDA graph that was captured once serves contexts of all lengths.
"""

# Kernels are in Triton's language, which its stubs do not make Python: constants are not numbers, loops no iterables.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import triton
import triton.language as tl

from cuda_track.kernels import blocks as mixed
from cuda_track.kernels import launch, record
from cuda_track.kernels.blocks import BlockLayout
from cuda_track.kernels.chained import launch_next, wait_for_previous
from cuda_track.kernels.decode import pages_of_codes
from cuda_track.kernels.encode import quantize_rows
from cuda_track.kernels.launch import Kernel, Shape
from cuda_track.kernels.mixed_bits import pages_of_mixed_bits, quantize_mixed_rows
from cuda_track.vllm.settings import PAGE, RECENT, SINK

if TYPE_CHECKING:
    from cuda_track.vllm.blocks import Blocks, Requests

WINDOW = 16  # exact tokens that a program reads at a time: a pointer each


class Exact(NamedTuple):
    """What kernels know of exact tokens. TOKENS: of a block. SINK: that stay exact at the start of a sequence. RECENT:
    at its end, at least. LONGEST: tokens of codes that a program sums at most."""

    TOKENS: int
    SINK: int
    RECENT: int
    LONGEST: int


@triton.jit(do_not_specialize=["key_row", "value_row"])
def keep_kernel(
    key, value, mean, exact, slots,  # [N, G, D] twice, [G, D], [blocks, G, TOKENS, 2 D], [N]
    key_row, value_row, block, head, token,  # strides
    D: tl.constexpr, TOKENS: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Grid (N, G): write a token of a head exactly."""
    i, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + i)
    if slot >= 0:
        d = tl.arange(0, D)
        to = exact + slot // TOKENS * block + g * head + slot % TOKENS * token
        x = tl.load(key + i * key_row + g * D + d)
        if CENTRED:
            x = x.to(tl.float32) - tl.load(mean + g * D + d)
        tl.store(to + d, x.to(exact.dtype.element_ty))
        tl.store(to + D + d, tl.load(value + i * value_row + g * D + d).to(exact.dtype.element_ty))


@triton.jit
def _filled(lengths, starts, b, i, PAGE: tl.constexpr, SINK: tl.constexpr):
    """Return (a page of request b, whether its new tokens filled it and it will be read). i: counted from the last."""
    length = tl.load(lengths + b)
    before = length - (tl.load(starts + b + 1) - tl.load(starts + b))
    page = length // PAGE - 1 - i
    return page, (page >= SINK // PAGE) & (page * PAGE + PAGE > before)


@triton.jit
def _rows_of_page(
    exact, table, page, g, block, head, token, PAGE: tl.constexpr, TOKENS: tl.constexpr
):
    """Return pointers to the exact tokens of a page, [PAGE]."""
    at = page * PAGE + tl.arange(0, PAGE)
    of = tl.load(table + at // TOKENS).to(tl.int64)
    return exact + of * block + g * head + at % TOKENS * token


PAGE_COUNTS = ["row_blocks", "row_pages"]


@triton.jit(do_not_specialize=PAGE_COUNTS)
def quantize_filled_kernel(
    exact, down, words, high, numbers, lengths, starts, near_table, table,
    block, head, token, row_blocks, row_pages, down_head, record,
    D: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, SINK: tl.constexpr,
    BITS: tl.constexpr, PLANES: tl.constexpr, GROUPS: tl.constexpr, CHANNEL: tl.constexpr,
    SYMMETRIC: tl.constexpr, RANK: tl.constexpr, KEYS: tl.constexpr, TURNED: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Grid (pages that a request can fill, G, B): quantize a page of one side. exact: of that side."""
    i, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    page, filled = _filled(lengths, starts, b, i, PAGE, SINK)
    if filled:
        rows = _rows_of_page(
            exact, near_table + b * row_blocks, page, g, block, head, token, PAGE, TOKENS
        )
        place = tl.load(table + b * row_pages + page).to(tl.int64) * tl.num_programs(1) + g
        inside = tl.arange(0, PAGE)
        quantize_rows(
            rows, down + g * down_head, words, high, numbers,
            place + 0 * inside, inside, place, 0, record,
            D, R, PAGE, BITS, PLANES, GROUPS, CHANNEL, SYMMETRIC, RANK, KEYS, TURNED, PARTS, BLOCK, FUSED, "affine",
        )  # fmt: skip


@triton.jit(do_not_specialize=[*PAGE_COUNTS, "stored", "half_tiles"])
def quantize_filled_mixed_kernel(
    exact, down, words, odd, numbers, lengths, starts, near_table, table, dims, recipe,
    block, head, token, row_blocks, row_pages, down_head, record, stored, half_tiles,
    D: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, SINK: tl.constexpr, KEYS: tl.constexpr,
    TURNED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `quantize_filled_kernel`, to mixed bits."""
    i, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    page, filled = _filled(lengths, starts, b, i, PAGE, SINK)
    if filled:
        rows = _rows_of_page(
            exact, near_table + b * row_blocks, page, g, block, head, token, PAGE, TOKENS
        )
        place = tl.load(table + b * row_pages + page).to(tl.int64) * tl.num_programs(1) + g
        step = tl.arange(0, PAGE // 64)
        quantize_mixed_rows(
            rows, down + g * down_head, words, odd, numbers, dims, recipe,
            place + 0 * step, step, record, stored, half_tiles, D, KEYS, TURNED, PARTS, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=[*PAGE_COUNTS, "splits", "slots", "rows", "new"])
def attend_blocks_kernel(
    q, sums, factors, plain,  # [B, G, N, R] float16, [B, G, 2, KG, N], [B, G, N], [B, H, L, D]
    k_words, k_high, k_numbers, v_words, v_high, v_numbers,
    exact, lengths, starts, table, near_table,
    part_out, part_top, part_sum, part_used,  # [B, G, S, N, R], [B, G, S, N] twice, [B, G]
    block, head_stride, token, row_blocks, row_pages, splits, slots, rows, new, plain_scale,
    C: tl.constexpr, X: tl.constexpr, MIXED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (splits + programs of exact tokens, G, B). C: constants of `decode` or `mixed_bits`. X: `Exact`. slots:
    programs that run at the same time, by which rows are split as by `launch.splits`."""
    R: tl.constexpr = C.R
    N: tl.constexpr = C.N
    FIRST: tl.constexpr = X.SINK // C.PAGE  # page that is read as codes
    split, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = b.to(tl.int64) * tl.num_programs(1) + g
    at = (head * tl.num_programs(0) + split) * N
    wait_for_previous(CHAINED)
    length = tl.load(lengths + b)
    before = length - (tl.load(starts + b + 1) - tl.load(starts + b))
    pages = tl.maximum((before + 1 - X.RECENT) // C.PAGE - FIRST, 0)  # that are read as codes
    around, heads = tl.num_programs(0) - splits, tl.num_programs(1) * tl.num_programs(2)
    needed = (pages * C.PAGE + X.LONGEST - 1) // X.LONGEST + around
    waves = (needed * heads + slots - 1) // slots
    used = tl.minimum(tl.minimum(pages, splits), tl.maximum(waves * slots // heads - around, 1))
    if split >= splits:
        tl.store(part_used + head, used)
        _exact_tokens(
            split - splits, around, plain + head * rows * R,
            exact + g * head_stride, near_table + b * row_blocks, block, token,
            tl.minimum(length, X.SINK), (FIRST + pages) * C.PAGE, length, before,
            part_out + at * R, part_top + at, part_sum + at, rows, new, plain_scale, C, X,
        )  # fmt: skip
    elif split < used:
        if MIXED:
            pages_of_mixed_bits(
                q + head * N * R, factors + head * N, k_words, k_high, k_numbers, v_words, v_high, v_numbers,
                table + b * row_pages + FIRST, pages, split, used, g, tl.num_programs(1), table,
                part_out + at * R, part_top + at, part_sum + at, rows, 0.0, C,
            )  # fmt: skip
        else:
            pages_of_codes(
                q + head * N * R, sums + head * 2 * C.K.GROUPS * N, factors + head * N,
                k_words, k_high, k_numbers, v_words, v_high, v_numbers,
                table + b * row_pages + FIRST, pages, split, used, g, tl.num_programs(1), table,
                part_out + at * R, part_top + at, part_sum + at, rows, 0.0, C,
            )  # fmt: skip
    launch_next(CHAINED)


@triton.jit
def _exact_tokens(
    part, parts, q, exact, table, block, token, sinks, recent, length, before,
    part_out, part_top, part_sum, rows, new, scale,
    C: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    """Attend to tokens 0 .. sinks - 1 and recent .. length - 1, every `parts`-th run of T."""
    D: tl.constexpr = C.R
    N: tl.constexpr = C.N
    T: tl.constexpr = C.WINDOW
    n, t, d = tl.arange(0, N), tl.arange(0, T), tl.arange(0, D)
    dtype = tl.float32 if C.WIDE else exact.dtype.element_ty
    queries = tl.load(q + n[None, :] * D + d[:, None], mask=n[None, :] < rows, other=0.0).to(dtype)
    last = before + n % new  # the token that row n is: it sees those up to itself
    top = tl.full([N], -1e30, tl.float32)
    total = tl.zeros([N], tl.float32)
    out = tl.zeros([D, N], tl.float32)
    count = sinks + tl.maximum(length - recent, 0)
    for i in tl.range(part, (count + T - 1) // T, parts, num_stages=1):
        at = i * T + t
        exists = at < count
        position = tl.where(at < sinks, at, recent + at - sinks)
        of = tl.load(table + position // X.TOKENS, mask=exists, other=0).to(tl.int64)
        rows_of = exact + of * block + position % X.TOKENS * token
        k = tl.load(rows_of[:, None] + d[None, :], mask=exists[:, None], other=0.0)
        s = tl.dot(k.to(dtype), queries, input_precision="ieee") * scale
        allowed = exists[:, None] & (position[:, None] <= last[None, :])
        s = tl.where(allowed, s, -1e30)
        higher = tl.maximum(top, tl.max(s, 0))
        p = tl.where(allowed, tl.exp2(s - higher[None, :]), 0.0)
        decay = tl.exp2(top - higher)
        top = higher
        total = total * decay + tl.sum(p, 0)
        v = tl.load(rows_of[None, :] + D + d[:, None], mask=exists[None, :], other=0.0)
        out = tl.dot(v.to(dtype), p.to(dtype), out * decay[None, :], input_precision="ieee")
    tl.store(part_out + n[None, :] * D + d[:, None], out, mask=n[None, :] < rows)
    tl.store(part_top + n, top)
    tl.store(part_sum + n, total)


@triton.jit(do_not_specialize=["sinks", "recent", "total"])
def gather_kernel(
    exact, table, out,  # table of one request; [2, G, total, D]
    block, head, token, sinks, recent, total, out_side, out_head,
    D: tl.constexpr, TOKENS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Grid (runs of T exact tokens, G): copy tokens 0 .. sinks - 1 and recent .. total - 1 of a request."""
    g = tl.program_id(1)
    at, d = tl.program_id(0) * T + tl.arange(0, T), tl.arange(0, D)
    exists = at < sinks + total - recent
    position = tl.where(at < sinks, at, recent + at - sinks)
    of = tl.load(table + position // TOKENS, mask=exists, other=0).to(tl.int64)
    rows = exact + of * block + g * head + position % TOKENS * token
    to = out + g.to(tl.int64) * out_head + position.to(tl.int64)[:, None] * D + d[None, :]
    for side in tl.static_range(2):
        x = tl.load(rows[:, None] + side * D + d[None, :], mask=exists[:, None], other=0.0)
        tl.store(to + side * out_side, x, mask=exists[:, None])


def gather(held: Blocks, table: torch.Tensor, sinks: int, recent: int, out: torch.Tensor) -> None:
    """Copy the first `sinks` tokens of a request, and those from `recent` on, to out [2, G, T, D]."""
    total, at_once = out.shape[2], 4 * WINDOW
    recent = min(max(recent, sinks), total)
    grid = max(1, -(-(sinks + total - recent) // at_once)), held.heads
    cast(Kernel, gather_kernel)[grid](
        *(held.exact, table, out, *held.exact.stride()[:3], sinks, recent, total),
        *(out.stride(0), out.stride(1)),
        **{"D": held.dims, "TOKENS": held.page_tokens, "T": at_once},
        num_warps=4,
    )


def write(
    held: Blocks, key: torch.Tensor, value: torch.Tensor, codes: Requests, near: Requests
) -> None:
    """Write new tokens exactly, and the pages that they fill as codes, as `Blocks.write`."""
    exact, dims = held.exact, held.dims
    block, head, token, _ = exact.stride()
    cast(Kernel, keep_kernel)[(near.tokens, held.heads)](
        *(key, value, launch.or_else(held.mean, key), exact, near.slots),
        *(key.stride(0), value.stride(0), block, head, token),
        **{"D": dims, "TOKENS": held.page_tokens, "CENTRED": held.mean is not None},
        num_warps=1,
    )
    grid = (-(-codes.longest // PAGE), held.heads, len(codes.lengths))
    for i, (code, at, side) in enumerate(zip(held.codecs, held.layouts, held.sides, strict=True)):
        source = exact[..., i * dims : (i + 1) * dims]
        sizes = {"D": dims, "PAGE": PAGE, "TOKENS": held.page_tokens, "SINK": SINK, "KEYS": i == 0}
        turned = (
            mixed.whole(code.transform, dims) if isinstance(at, BlockLayout) else code.transform
        )
        down, of_head, parts = launch.down_of(turned, exact.dtype)
        sizes |= {"TURNED": down is not None, "PARTS": parts, "BLOCK": launch.QUANTIZE_BLOCK}
        tensors = (source, launch.or_else(down, source), *launch.tensors(side))
        batch = (codes.lengths, codes.starts, near.table, codes.table)
        strides = (block, head, token, near.table.stride(0), codes.table.stride(0), of_head)
        if isinstance(at, BlockLayout):
            cast(Kernel, quantize_filled_mixed_kernel)[grid](
                *(*tensors, *batch, mixed.numbers_of_dims(at, dims, exact.device)),
                *(mixed.recipe(at, dims, exact.device), *strides, record.stride(side)),
                *(at.dims, at.quantizer.words),
                **sizes,
                num_warps=4,
            )
            continue
        of_side = launch.constants_of(at) | {"GROUPS": at.groups, "CHANNEL": at.channel_tokens}
        of_side |= {"SYMMETRIC": at.quantizer.symmetric, "RANK": at.quantizer.clip_rank(at.dims)}
        cast(Kernel, quantize_filled_kernel)[grid](
            *(*tensors, *batch, *strides, record.stride(side)),
            **{**sizes, **of_side, "R": at.dims, "FUSED": not launch.interpreted()},
            num_warps=4,
        )


def attend(
    held: Blocks,
    q: torch.Tensor,
    out: torch.Tensor,
    batch: int,
    new: int,
    codes: Requests,
    near: Requests,
    scale: float,
) -> None:
    """Attend with the `new` tokens of each of the first `batch` requests: q, out [batch new, H, D]."""
    heads, dims, device = q.shape[1], held.dims, q.device
    turned_round = new > 1  # kernels have the tokens of a head together
    queries = (
        q.view(batch, new, heads, dims).transpose(1, 2).contiguous()
        if turned_round
        else q.contiguous()
    )
    at = Shape(batch, held.heads, heads // held.heads * new, new, dims, device)
    tuned = launch.launch_for(held.layouts, dims, at.padded)
    grid = batch * held.heads, device, tuned.programs
    slots, _ = launch.slots_of(*grid)
    splits, around = launch.splits(codes.table.shape[1], PAGE, *grid)
    up_keys, up_values = launch.matrices_of(held.codecs, held.layouts, dims, device)
    stored, sums, factors = launch.turn_queries(queries, at, held.layouts[0], up_keys, scale)
    partials, used = (
        at.partials(splits + around),
        torch.empty(batch, held.heads, dtype=torch.int32, device=device),
    )
    options = {
        **{"R": dims, "N": at.padded, "PAGE": PAGE, "RECORD": record.stride(held.sides[0])},
        **{"MASKED": False, "CAPPED": False, "ASM": launch.by_ptx(), "STAGES": tuned.stages},
        "WIDE": launch.interpreted() and held.exact.dtype == torch.bfloat16,
    }
    constants = launch.attend_constants(held.layouts, options)._replace(WINDOW=WINDOW)
    exact = Exact(held.page_tokens, SINK, RECENT, launch.LONGEST)
    block, head, token, _ = held.exact.stride()
    cast(Kernel, attend_blocks_kernel)[(splits + around, held.heads, batch)](
        *(stored, sums, factors, queries),
        *(x for side in held.sides for x in launch.tensors(side)),
        *(held.exact, codes.lengths, codes.starts, codes.table, near.table, *partials, used),
        *(block, head, token, near.table.stride(0), codes.table.stride(0)),
        *(splits, slots, at.rows, new, scale * launch.LOG2E),
        **{"C": constants, "X": exact, "MIXED": isinstance(held.layouts[0], BlockLayout)},
        **tuned.options(device),
    )
    result = torch.empty_like(queries) if turned_round else out
    launch.merge(partials, at, (splits, around), up_values, result, used=used)
    if turned_round:
        out.view(batch, new, heads, dims).copy_(result.transpose(1, 2))
