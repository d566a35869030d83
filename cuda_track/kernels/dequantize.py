"""Decode pages of a pool in the stored domain, in Triton, for prefill."""

# Kernels are in Triton's language, which its stubs do not make Python: constants are not numbers, loops no iterables.
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from cuda_track.kernels.codes import at_record, cos_and_sin, halves, level_of


@triton.jit(do_not_specialize=["row_pages", "start"])
def dequantize_kernel(
    words, high, numbers, table, pages, out,  # of one side; [B, row_pages], [B]; [B, G, tokens, R]
    row_pages, start, out_row, out_head, record,
    R: tl.constexpr, T: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr,
    PLANES: tl.constexpr, GROUPS: tl.constexpr, CHANNEL: tl.constexpr, KEYS: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Grid (row_pages * PAGE / T, G, B): T tokens of a page, written from `start` on. CHANNEL: tokens of
    a page that share scales per channel, 0: scales are per token."""
    block, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    page = block // (PAGE // T)
    if page < tl.load(pages + b):
        J: tl.constexpr = R // PLANES
        t, r, j = block % (PAGE // T) * T + tl.arange(0, T), tl.arange(0, R), tl.arange(0, J)
        place = tl.load(table + b * row_pages + page).to(tl.int64) * tl.num_programs(1) + g
        if KEYS:
            at = t[:, None] * J + j[None, :]
        else:
            at = t[:, None] + j[None, :] * PAGE
        plane = tl.arange(0, PLANES)[None, :, None]
        word = tl.load(at_record(words, place, record) + at).to(tl.int32)[:, None, :]
        if BITS == 3:
            high_bits = tl.load(at_record(high, place, record) + at).to(tl.int32)[:, None, :]
            code = (word >> (plane * 2) & 3) | (high_bits >> plane & 1) << 2
        else:
            code = word >> (plane * BITS) & ((1 << BITS) - 1)
        if KIND == "codebook":
            x = level_of(code, R, BITS)
        elif KIND == "polar":
            x = code.to(tl.float32) + 0.5
        else:
            x = code.to(tl.float32)
        if CHANNEL:
            row = block % (PAGE // T) * T // CHANNEL
            scale, bias = halves(tl.load(at_record(numbers, place, record) + row * R + r))
            x = tl.reshape(x, [T, R]) * scale[None, :] + bias[None, :]
            if KIND == "polar":
                pairs = tl.permute(tl.reshape(x, [T, 2, R // 2]), (0, 2, 1))
                radius, angle = tl.split(pairs)
                cos, sin = cos_and_sin(angle, False)
                pairs = tl.permute(tl.join(radius * cos, radius * sin), (0, 2, 1))
                x = tl.reshape(pairs, [T, R])
        else:
            group = tl.arange(0, GROUPS)
            at = at_record(numbers, place, record) + group[None, :] * PAGE + t[:, None]
            pairs = tl.load(at)
            scale, bias = halves(pairs)
            x = tl.reshape(x, [T, GROUPS, R // GROUPS]) * scale[:, :, None] + bias[:, :, None]
            x = tl.reshape(x, [T, R])
        tokens = start + block.to(tl.int64) * T + tl.arange(0, T)
        at = b.to(tl.int64) * out_row + g.to(tl.int64) * out_head + tokens[:, None] * R + r[None, :]
        tl.store(out + at, x.to(out.dtype.element_ty))
