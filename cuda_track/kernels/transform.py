"""Transform queries into the stored domain before `attend_kernel`; merge partial outputs and transform them back
after it."""

# Kernels are in Triton's language, which its stubs do not make Python: constants are not numbers, loops no iterables.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from cuda_track.kernels.chained import launch_next, wait_for_previous
from cuda_track.kernels.codes import OFFSET, gain_bits


@triton.jit(do_not_specialize=["rows"])
def queries_kernel(
    # [B, H, L, D], [G or 1, R, D], [B, G, N, R], [B, G, 2, KG, N], [B, G, N]
    q, up, out, sums, factors,
    rows, scale, up_head,
    D: tl.constexpr, R: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr,
    BITS: tl.constexpr, PLANES: tl.constexpr, TURNED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (N, G, B), a row each. Writes q @ up^T, scaled to +-1 and divided by the gains of keys, as float16.

    factors: what scores are multiplied with, for base 2. sums, over the dims of a group of keys: of the rounded
    queries, and of what the offset of codes adds.
    """
    n, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = b.to(tl.int64) * tl.num_programs(1) + g
    r, d = tl.arange(0, R), tl.arange(0, D)
    wait_for_previous(CHAINED)
    if TURNED:
        at = up + g * up_head + r[:, None] * D + d[None, :]
        matrix = tl.load(at, mask=(n + 0 * r)[:, None] < rows, other=0.0)
        row = tl.load(q + (head * rows + n) * D + d, mask=n + 0 * d < rows, other=0.0)
        x = tl.sum(matrix * row.to(tl.float32)[None, :], 1)
    else:
        x = tl.load(q + (head * rows + n) * D + r, mask=n + 0 * r < rows, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 0)
    largest = tl.where(largest > 0, largest, 1.0)
    gain = tl.exp2(gain_bits(r // (R // PLANES), BITS).to(tl.float32))
    x = (x / largest / gain).to(tl.float16)
    tl.store(out + (head * N + n) * R + r, x)
    tl.store(factors + head * N + n, largest * scale)
    x = x.to(tl.float32)
    at = sums + head * 2 * GROUPS * N + tl.arange(0, GROUPS) * N + n
    tl.store(at, tl.sum(tl.reshape(x * gain, [GROUPS, R // GROUPS]), 1))
    tl.store(at + GROUPS * N, tl.sum(tl.reshape(x, [GROUPS, R // GROUPS]), 1) * OFFSET)
    launch_next(CHAINED)  # late: programs of attention would take the room of these


@triton.jit(do_not_specialize=["splits", "windows", "rows", "new"])
def merge_kernel(
    part_out, part_top, part_sum, up, sinks, used, out,  # partials, [G or 1, R, D], [H], [B, G], [B, H, L, D]
    splits, windows, rows, new, up_head,
    D: tl.constexpr, R: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
    TURNED: tl.constexpr, SINKS: tl.constexpr, USED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (rows * D / BLOCK, G, B): BLOCK dims of a row. Splits 0 .. splits - 1 lie in the stored domain, the
    `windows` behind them do not. USED: only the first `used` splits were computed. Loads depend on each other as
    little as possible: this kernel's time is latency."""
    g, b = tl.program_id(1), tl.program_id(2)
    head = b.to(tl.int64) * tl.num_programs(1) + g
    SLICES: tl.constexpr = D // BLOCK
    n = tl.program_id(0) // SLICES
    r, d = tl.arange(0, R), tl.program_id(0) % SLICES * BLOCK + tl.arange(0, BLOCK)
    if TURNED:
        matrix = tl.load(up + g * up_head + r[:, None] * D + d[None, :])
    wait_for_previous(CHAINED)
    launch_next(CHAINED)
    s, parts = tl.arange(0, SPLITS), splits + windows
    first, last = head * parts * N + n, splits
    exists = s < parts
    if USED:
        last = tl.load(used + head)
        exists = exists & ((s < last) | (s >= splits))
    tops = tl.load(part_top + first + s * N, mask=exists, other=-float("inf"))
    sums = tl.load(part_sum + first + s * N, mask=exists, other=0.0)
    top = tl.max(tops, 0)
    total = 0.0
    if SINKS:  # logits without a value
        sink = tl.load(sinks + g * (rows // new) + n // new).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
        total += tl.exp2(sink - top)
    total += tl.sum(tl.exp2(tops - top) * sums, 0)
    partials = tl.zeros([CHUNK, R if TURNED else BLOCK], tl.float32)
    dims = r if TURNED else d
    for start in range(0, last, CHUNK):
        c = start + tl.arange(0, CHUNK)
        inside = c < last
        of = tl.load(part_top + first + c * N, mask=inside, other=-float("inf"))
        part = part_out + (first + c * N)[:, None] * R + dims[None, :]
        partials += tl.load(part, mask=inside[:, None], other=0.0) * tl.exp2(of - top)[:, None]
    y = tl.sum(partials, 0)
    if TURNED:
        y = tl.sum(matrix * y[:, None], 0)
    for w in range(windows):
        at = first + (splits + w) * N
        y += tl.exp2(tl.load(part_top + at) - top) * tl.load(part_out + at * D + d)
    if USED:  # rows that only fill a batch up have no tokens
        total = tl.where(total > 0, total, 1.0)
    tl.store(out + (head * rows + n) * D + d, (y / total).to(out.dtype.element_ty))


# -- The same for many rows: M of them share a program, which reads the matrix once.


@triton.jit(do_not_specialize=["rows", "batch", "each"])
def many_queries_kernel(
    q, up, out, sums, factors,  # [B, H, L, D], [G or 1, R, D], [B, G, N, R], [B, G, 2, KG, N], [B, G, N]
    rows, scale, up_head, batch, each,
    D: tl.constexpr, R: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr,
    BITS: tl.constexpr, PLANES: tl.constexpr, TURNED: tl.constexpr, M: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (N / M, G, B / each), M rows of each of `each` requests, which share a matrix; else as `queries_kernel`."""
    g = tl.program_id(1)
    n = tl.program_id(0) * M + tl.arange(0, M)
    r, d = tl.arange(0, R), tl.arange(0, D)
    gain = tl.exp2(gain_bits(r // (R // PLANES), BITS).to(tl.float32))
    if TURNED:
        matrix = tl.load(up + g * up_head + r[:, None] * D + d[None, :])
    wait_for_previous(CHAINED)
    first = tl.program_id(2) * each
    heads = tl.num_programs(1).to(tl.int64)
    for b in tl.range(first, tl.minimum(first + each, batch), num_stages=1):
        head = b * heads + g
        x = tl.load(q + (head * rows + n)[None, :] * D + d[:, None], (n < rows)[None, :], 0.0)
        x = x.to(tl.float32)
        if TURNED:
            x = tl.dot(matrix, x, input_precision="tf32x3")
        largest = tl.max(tl.abs(x), 0)
        largest = tl.where(largest > 0, largest, 1.0)
        x = (x / largest[None, :] / gain[:, None]).to(tl.float16)
        tl.store(out + (head * N + n)[None, :] * R + r[:, None], x)
        tl.store(factors + head * N + n, largest * scale)
        x = x.to(tl.float32)
        at = sums + head * 2 * GROUPS * N + tl.arange(0, GROUPS)[:, None] * N + n[None, :]
        tl.store(at, tl.sum(tl.reshape(x * gain[:, None], [GROUPS, R // GROUPS, M]), 1))
        at += GROUPS * N
        tl.store(at, tl.sum(tl.reshape(x, [GROUPS, R // GROUPS, M]), 1) * OFFSET)
    launch_next(CHAINED)


@triton.jit(do_not_specialize=["splits", "windows", "rows", "new", "batch", "each"])
def many_merge_kernel(
    part_out, part_top, part_sum, up, sinks, used, out,  # partials, [G or 1, R, D], [H], [B, G], [B, H, L, D]
    splits, windows, rows, new, up_head, batch, each,
    D: tl.constexpr, R: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
    TURNED: tl.constexpr, SINKS: tl.constexpr, USED: tl.constexpr, CHUNK: tl.constexpr, M: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (rows / M, G, B / each), M rows of each of `each` requests, which share a matrix; else as `merge_kernel`."""
    g = tl.program_id(1)
    n = tl.program_id(0) * M + tl.arange(0, M)
    r, d = tl.arange(0, R), tl.arange(0, D)
    if TURNED:
        matrix = tl.load(up + g * up_head + r[:, None] * D + d[None, :])
    wait_for_previous(CHAINED)
    launch_next(CHAINED)
    first_row = tl.program_id(2) * each
    heads = tl.num_programs(1).to(tl.int64)
    for b in tl.range(first_row, tl.minimum(first_row + each, batch), num_stages=1):
        head = b * heads + g
        s, parts = tl.arange(0, SPLITS)[:, None], splits + windows
        first, last = head * parts * N + n, splits
        exists = (s < parts) & (n < rows)[None, :]
        if USED:
            last = tl.load(used + head)
            exists = exists & ((s < last) | (s >= splits))
        tops = tl.load(part_top + first[None, :] + s * N, mask=exists, other=-float("inf"))
        sums = tl.load(part_sum + first[None, :] + s * N, mask=exists, other=0.0)
        top = tl.max(tops, 0)
        top = tl.where(n < rows, top, 0.0)
        total = tl.where(n < rows, 0.0, 1.0)
        if SINKS:  # logits without a value
            sink = tl.load(sinks + g * (rows // new) + n // new, n < rows, 0.0)
            sink = sink.to(tl.float32) * 1.4426950408889634
            top = tl.maximum(top, sink)
            total += tl.exp2(sink - top)
        total += tl.sum(tl.exp2(tops - top[None, :]) * sums, 0)
        dims = r if TURNED else d
        partials = tl.zeros([CHUNK, dims.shape[0], M], tl.float32)
        row = first[None, None, :]
        for start in range(0, last, CHUNK):
            c = start + tl.arange(0, CHUNK)[:, None, None]
            inside = (c < last) & (n < rows)[None, None, :]
            of = tl.load(part_top + row + c * N, mask=inside, other=-float("inf"))
            part = part_out + (row + c * N) * R + dims[None, :, None]
            partials += tl.load(part, mask=inside, other=0.0) * tl.exp2(of - top[None, None, :])
        y = tl.sum(partials, 0)  # [dims, M]
        if TURNED:
            y = tl.dot(tl.trans(matrix), y, input_precision="tf32x3")
        for w in range(windows):
            at = first + (splits + w) * N
            weight = tl.exp2(tl.load(part_top + at, n < rows, -float("inf")) - top)
            part = part_out + at[None, :] * D + d[:, None]
            y += weight[None, :] * tl.load(part, (n < rows)[None, :], 0.0)
        if USED:
            total = tl.where(total > 0, total, 1.0)
        result = (y / total[None, :]).to(out.dtype.element_ty)
        tl.store(out + (head * rows + n)[None, :] * D + d[:, None], result, (n < rows)[None, :])
