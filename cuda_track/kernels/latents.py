"""Decode attention over latents (MLA) in Triton: a latent is key and value of all heads, and is decoded once for a
block of them.

A program takes a block of query heads and a run of tokens, in pages or in the windows: a tile of codes becomes float16
[tokens, R] and is multiplied twice, as keys with the absorbed queries, and with the weights as values. The rotary part
of a score is a product of its own, of exact rotary keys or of those in 8 bits. `merge_kernel` joins the partial outputs
and turns those of pages back. Plain-ops twin: `cache.latent.attend`. It reads the arrays that plain ops read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cuda_track.cache.view import CodePages, Pair
from cuda_track.kernels import launch
from cuda_track.kernels.turn import merge_kernel
from mlxkv.formats.affine import HALF_MAX

HEADS = 16, 32  # of a program: at least, so that a matrix product takes them, and at most
WINDOWS = 2  # programs of the windows
PROGRAMS = 1  # on one multiprocessor, by which splits are sized
STAGES = 1  # of the pipeline over pages: two would spill


@triton.jit
def _decoded(
    codes, scales, biases, t, exists,
    R: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, CHANNEL: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """The latents of tokens t [T], float16 [T, R], in the stored domain. codes: a little-endian bit stream per token;
    scales, biases: per token and GROUP dims, or with CHANNEL per dim and GROUP tokens, which a tile does not cross."""
    WORDS: tl.constexpr = R * BITS // 32
    T: tl.constexpr = t.shape[0]
    row = codes + t[:, None].to(tl.int64) * WORDS
    if BITS == 3:  # a code may lie in two words
        first = tl.arange(0, R) * 3
        word, bit = first // 32, first % 32
        low = tl.load(row + word[None, :], mask=exists[:, None], other=0).to(tl.uint32)
        next_word = tl.minimum(word + 1, WORDS - 1)
        high = tl.load(row + next_word[None, :], mask=exists[:, None], other=0).to(tl.uint32)
        cut = (bit > 29)[None, :]
        spare = tl.where(cut, high << (32 - bit)[None, :], 0)
        code = ((low >> bit[None, :]) | spare) & 7
    else:
        EACH: tl.constexpr = 32 // BITS
        words = tl.load(row + tl.arange(0, WORDS)[None, :], mask=exists[:, None], other=0)
        shifts = (tl.arange(0, EACH) * BITS).to(tl.uint32)
        code = (words.to(tl.uint32)[:, :, None] >> shifts[None, None, :]) & ((1 << BITS) - 1)
        code = tl.reshape(code, [T, R])
    if CHANNEL:
        d = tl.arange(0, R)
        at = (tl.min(t, 0).to(tl.int64) // GROUP) * R + d
        scale = tl.load(scales + at).to(tl.float32)
        bias = -(1 << (BITS - 1)) * scale if SYMMETRIC else tl.load(biases + at).to(tl.float32)
        return (code.to(tl.float32) * scale[None, :] + bias[None, :]).to(tl.float16)
    GROUPS: tl.constexpr = R // GROUP
    at = t[:, None].to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[None, :]
    scale = tl.load(scales + at, mask=exists[:, None], other=0.0).to(tl.float32)
    if SYMMETRIC:
        bias = -(1 << (BITS - 1)) * scale
    else:
        bias = tl.load(biases + at, mask=exists[:, None], other=0.0).to(tl.float32)
    grouped = tl.reshape(code.to(tl.float32), [T, GROUPS, GROUP])
    return tl.reshape(grouped * scale[:, :, None] + bias[:, :, None], [T, R]).to(tl.float16)


@triton.jit
def _added(s, x, visible, top, total, out):
    """Running softmax: take scores s [H, T] in base-2 exponents and their values x [T, R] in."""
    s = tl.where(visible[None, :], s, -1e30)
    higher = tl.maximum(top, tl.max(s, 1))
    p = tl.where(visible[None, :], tl.exp2(s - higher[:, None]), 0.0)
    decay = tl.exp2(top - higher)
    out = tl.dot(p.to(x.dtype), x, out * decay[:, None], input_precision="ieee")
    return higher, total * decay + tl.sum(p, 1), out


@triton.jit
def _of_pages(
    qt, q_pages, codes, scales, biases, turned, steps, mask,  # of a row of the batch
    at, is_head, split, splits, tokens, scale, top, total, out,
    R: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, CHANNEL: tl.constexpr, SYMMETRIC: tl.constexpr,
    TURNED_BITS: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take in a run of the tokens in pages, in the stored domain."""
    d, n = tl.arange(0, R), tl.arange(0, N)
    q = tl.load(q_pages + at * R + d[None, :], mask=is_head[:, None], other=0.0)
    blocks = (tokens + T - 1) // T
    first = (split.to(tl.int64) * blocks // splits).to(tl.int32)
    last = ((split.to(tl.int64) + 1) * blocks // splits).to(tl.int32)
    for i in tl.range(first, last, num_stages=STAGES):
        t = i * T + tl.arange(0, T)
        exists = t < tokens
        x = _decoded(codes, scales, biases, t, exists, R, BITS, GROUP, CHANNEL, SYMMETRIC)
        place = t[:, None].to(tl.int64)
        if TURNED_BITS == 8:
            rows = turned + place * (N // 4) + (n // 4)[None, :]
            word = tl.load(rows, mask=exists[:, None], other=0).to(tl.uint32)
            code = (word >> (n % 4 * 8).to(tl.uint32)[None, :]) & 255
            step = tl.load(steps + t, mask=exists, other=0.0).to(tl.float32)
            k = ((code.to(tl.float32) - 128.0) * step[:, None]).to(qt.dtype)
        else:
            rows = turned + place * N + n[None, :]
            k = tl.load(rows, mask=exists[:, None], other=0.0).to(qt.dtype)
        s = tl.dot(qt, tl.trans(k), input_precision="ieee") * scale
        s = tl.dot(q, tl.trans(x), s)
        if MASKED:
            visible = tl.load(mask + t, mask=exists, other=0)
            exists = exists & (visible != 0)
        top, total, out = _added(s, x, exists, top, total, out)
    return top, total, out


@triton.jit
def _of_windows(
    qt, q_window, sink, sink_turned, live, live_turned, mask,
    at, is_head, part, parts, tokens, n_sink, n_live, scale, top, total, out,
    R: tl.constexpr, N: tl.constexpr, T: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Take in every `parts`-th T of the sink's and the live tokens, in the model's domain."""
    d, n = tl.arange(0, R), tl.arange(0, N)
    q = tl.load(q_window + at * R + d[None, :], mask=is_head[:, None], other=0.0)
    if WIDE:
        q = q.to(tl.float32)
    sink_blocks = (n_sink + T - 1) // T
    for i in tl.range(part, sink_blocks + (n_live + T - 1) // T, parts, num_stages=1):
        in_sink = i < sink_blocks
        t = tl.where(in_sink, i, i - sink_blocks) * T + tl.arange(0, T)
        exists = t < tl.where(in_sink, n_sink, n_live)
        if in_sink:
            row, turned_row = sink, sink_turned
        else:
            row, turned_row = live, live_turned
        x = tl.load(row + t[:, None] * R + d[None, :], mask=exists[:, None], other=0.0)
        k = tl.load(turned_row + t[:, None] * N + n[None, :], mask=exists[:, None], other=0.0)
        x = x.to(q.dtype)
        s = tl.dot(qt, tl.trans(k.to(qt.dtype)), input_precision="ieee")
        s = tl.dot(q, tl.trans(x), s, input_precision="ieee") * scale
        if MASKED:
            offset = tl.where(in_sink, 0, n_sink + tokens)
            visible = tl.load(mask + offset + t, mask=exists, other=0)
            exists = exists & (visible != 0)
        top, total, out = _added(s, x, exists, top, total, out)
    return top, total, out


COUNTS = ["tokens", "n_sink", "n_live", "splits", "mask_row", "heads"]
COUNTS += ["code_row", "scale_row", "turn_row", "step_row"]  # they grow with the room of pages


@triton.jit(do_not_specialize=COUNTS)
def latent_kernel(
    q_pages, q_window, q_turned,  # [B, H, R] float16, scaled; [B, H, R]; [B, H, N]
    codes, scales, biases, turned, steps,  # of pages: latents; rotary keys, and their scales where they are codes
    sink, sink_turned, live, live_turned,  # windows, [B, tokens, R] and [B, tokens, N]
    code_row, scale_row, turn_row, step_row, sink_row, sink_turn_row, live_row, live_turn_row,  # strides of the batch
    mask, mask_row,  # uint8 [B, tokens], or nothing
    part_out, part_top, part_sum,  # [B, S, heads padded, R], [B, S, heads padded] twice
    tokens, n_sink, n_live, splits, heads, scale,
    R: tl.constexpr, N: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, CHANNEL: tl.constexpr, SYMMETRIC: tl.constexpr,
    TURNED_BITS: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (splits + programs of windows, blocks of H heads, B). tokens: in pages. TURNED_BITS: 16, rotary keys are
    exact, or 8. WIDE: products take float32 in place of bfloat16, which Triton's interpreter does not know."""
    split, block, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    h, d, n = block * H + tl.arange(0, H), tl.arange(0, R), tl.arange(0, N)
    is_head = h < heads
    top = tl.full([H], -1e30, tl.float32)
    total = tl.zeros([H], tl.float32)
    out = tl.zeros([H, R], tl.float32)
    at = (b * heads + h)[:, None]
    qt = tl.load(q_turned + at * N + n[None, :], mask=is_head[:, None], other=0.0)
    if WIDE:
        qt = qt.to(tl.float32)
    row = mask + b * mask_row
    # Pages hold 16 tokens and more.
    code_row, scale_row = tl.multiple_of(code_row, 16), tl.multiple_of(scale_row, 16)
    turn_row, step_row = tl.multiple_of(turn_row, 16), tl.multiple_of(step_row, 16)
    if split < splits:
        top, total, out = _of_pages(
            qt, q_pages, codes + b * code_row, scales + b * scale_row, biases + b * scale_row,
            turned + b * turn_row, steps + b * step_row, row + n_sink,
            at, is_head, split, splits, tokens, scale, top, total, out,
            R, N, T, BITS, GROUP, CHANNEL, SYMMETRIC, TURNED_BITS, MASKED, STAGES,
        )  # fmt: skip
    else:
        top, total, out = _of_windows(
            qt, q_window, sink + b * sink_row, sink_turned + b * sink_turn_row,
            live + b * live_row, live_turned + b * live_turn_row, row,
            at, is_head, split - splits, tl.num_programs(0) - splits, tokens, n_sink, n_live, scale,
            top, total, out, R, N, T, MASKED, WIDE,
        )  # fmt: skip
    padded = tl.num_programs(1) * H
    slot = (b * tl.num_programs(0) + split) * padded + h
    tl.store(part_out + slot[:, None] * R + d[None, :], out, mask=is_head[:, None])
    tl.store(part_top + slot, top)
    tl.store(part_sum + slot, total)


def attend(
    queries: torch.Tensor,
    turned: torch.Tensor,
    pages: CodePages,
    sink: Pair | None,
    live: Pair,
    scale: float,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with absorbed queries [B, H, 1, R] and their rotary parts [B, H, 1, N]. Returns [B, H, 1, R].

    pages: codes of latents (keys), and rotary keys (values). live, sink: (latents, rotary keys) [B, 1, T, ...]. mask:
    boolean [B, T], tokens that may be seen. `choose.why_no_latents` says what it takes.
    """
    batch, heads, _, dims = queries.shape
    device, spec, code = queries.device, pages.codecs[0].spec, pages.codecs[0]
    stored, rotary_stored = pages.stored
    channel = spec.axis == "channel"
    group = spec.group_size(dims, code.page)
    tile = 16 if channel and group % 32 else 32
    block_heads = min(HEADS[1], max(HEADS[0], 1 << (heads - 1).bit_length()))
    blocks = -(-heads // block_heads)
    split = launch._processors(device) * PROGRAMS // max(1, blocks * batch) - WINDOWS
    split = max(1, min(split, -(-pages.tokens // tile)), -(-pages.tokens // launch.LONGEST))
    parts = split + WINDOWS
    q = code.query(queries) * (scale * launch.LOG2E)
    q = q.clamp(-HALF_MAX, HALF_MAX).half().contiguous()
    windows = [launch.rows_together(x) for x in (*(sink or live), *live)]
    exact = "values" in rotary_stored
    rotary = launch.rows_together(rotary_stored["values" if exact else "codes"])
    steps = rotary if exact else launch.rows_together(rotary_stored["scale"])
    codes, scales = (launch.rows_together(stored[name]) for name in ("codes", "scale"))
    biases = scales if spec.symmetric else launch.rows_together(stored["bias"])
    visible = None if mask is None else mask.to(torch.uint8).contiguous()
    room = {"dtype": torch.float32, "device": device}
    out = torch.empty(batch, parts, blocks * block_heads, dims, **room)
    top, total = (torch.empty(batch, parts, blocks * block_heads, **room) for _ in range(2))
    kind = windows[2].dtype
    latent_kernel[(parts, blocks, batch)](
        *(q, queries.to(kind).contiguous(), turned.to(kind).contiguous()),
        *(codes, scales, biases, rotary, steps, *windows),
        *(x.stride(0) for x in (codes, scales, rotary, steps, *windows)),
        *(q if visible is None else visible, 0 if visible is None else visible.shape[1]),
        *(out, top, total),
        *(pages.tokens, 0 if sink is None else sink[0].shape[2], live[0].shape[2]),
        *(split, heads, scale * launch.LOG2E),
        **{"R": dims, "N": turned.shape[3], "H": block_heads, "T": tile, "BITS": spec.bits},
        **{"GROUP": group, "CHANNEL": channel, "SYMMETRIC": spec.symmetric},
        TURNED_BITS=16 if exact else 8,
        MASKED=visible is not None,
        WIDE=launch.interpreted() and kind == torch.bfloat16,
        STAGES=STAGES,
        num_warps=4 if dims <= 128 else 8,
    )
    up = None if code.transform is None else code.transform.up
    result = torch.empty_like(queries)
    block = min(dims, 64)
    slots = 1 << (parts - 1).bit_length()
    merge_kernel[(heads * (dims // block), 1, batch)](
        *(out, top, total, out if up is None else up.contiguous(), out, result),
        *(split, WINDOWS, heads, 1, 0),
        **{"D": dims, "R": dims, "N": blocks * block_heads, "SPLITS": slots, "BLOCK": block},
        CHUNK=min(launch.MERGED // dims, slots),
        **{"TURNED": up is not None, "SINKS": False, "CHAINED": False},
        num_warps=16 if up is not None else 4,
    )
    return result
