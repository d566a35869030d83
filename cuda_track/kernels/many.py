"""The kernels of `transform.py` for many rows: M of them share a program, which reads the matrix once."""

# Kernels are in Triton's language, which its stubs do not make Python: constants are not numbers, loops no iterables.
# pyright: reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from cuda_track.kernels.chained import launch_next, wait_for_previous
from cuda_track.kernels.codes import OFFSET, gain_bits


@triton.jit(do_not_specialize=["rows"])
def many_queries_kernel(
    q, up, out, sums, factors,  # [B, H, L, D], [G or 1, R, D], [B, G, N, R], [B, G, 2, KG, N], [B, G, N]
    rows, scale, up_head,
    D: tl.constexpr, R: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr,
    BITS: tl.constexpr, PLANES: tl.constexpr, TURNED: tl.constexpr, M: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (N / M, G, B), M rows each; else as `queries_kernel`."""
    g, b = tl.program_id(1), tl.program_id(2)
    head = b.to(tl.int64) * tl.num_programs(1) + g
    n = tl.program_id(0) * M + tl.arange(0, M)
    r, d = tl.arange(0, R), tl.arange(0, D)
    gain = tl.exp2(gain_bits(r // (R // PLANES), BITS).to(tl.float32))
    wait_for_previous(CHAINED)
    x = tl.load(q + (head * rows + n)[None, :] * D + d[:, None], (n < rows)[None, :], 0.0)
    x = x.to(tl.float32)
    if TURNED:
        matrix = tl.load(up + g * up_head + r[:, None] * D + d[None, :])
        x = tl.dot(matrix, x, input_precision="tf32x3")
    largest = tl.max(tl.abs(x), 0)
    largest = tl.where(largest > 0, largest, 1.0)
    x = (x / largest[None, :] / gain[:, None]).to(tl.float16)
    tl.store(out + (head * N + n)[None, :] * R + r[:, None], x)
    tl.store(factors + head * N + n, largest * scale)
    x = x.to(tl.float32)
    at = sums + head * 2 * GROUPS * N + tl.arange(0, GROUPS)[:, None] * N + n[None, :]
    tl.store(at, tl.sum(tl.reshape(x * gain[:, None], [GROUPS, R // GROUPS, M]), 1))
    tl.store(at + GROUPS * N, tl.sum(tl.reshape(x, [GROUPS, R // GROUPS, M]), 1) * OFFSET)
    launch_next(CHAINED)


@triton.jit(do_not_specialize=["splits", "windows", "rows", "new"])
def many_merge_kernel(
    part_out, part_top, part_sum, up, sinks, out,  # partials, [G or 1, R, D], [H], [B, H, L, D]
    splits, windows, rows, new, up_head,
    D: tl.constexpr, R: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
    TURNED: tl.constexpr, SINKS: tl.constexpr, CHUNK: tl.constexpr, M: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (rows / M, G, B), M rows each; else as `merge_kernel`."""
    g, b = tl.program_id(1), tl.program_id(2)
    head = b.to(tl.int64) * tl.num_programs(1) + g
    n = tl.program_id(0) * M + tl.arange(0, M)
    r, d = tl.arange(0, R), tl.arange(0, D)
    if TURNED:
        matrix = tl.load(up + g * up_head + r[:, None] * D + d[None, :])
    wait_for_previous(CHAINED)
    launch_next(CHAINED)
    s, parts = tl.arange(0, SPLITS)[:, None], splits + windows
    first = head * parts * N + n
    exists = (s < parts) & (n < rows)[None, :]
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
    for start in range(0, splits, CHUNK):
        c = start + tl.arange(0, CHUNK)[:, None, None]
        inside = (c < splits) & (n < rows)[None, None, :]
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
    result = (y / total[None, :]).to(out.dtype.element_ty)
    tl.store(out + (head * rows + n)[None, :] * D + d[:, None], result, (n < rows)[None, :])
