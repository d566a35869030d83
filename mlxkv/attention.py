"""`attend(q, view)`: attention over sink | pages | live.

No pages: `mx.fast` SDPA on plain arrays, bit for bit what an uncompressed cache gives. A few new
tokens: a kernel that reads page records, or plain products with the codes. Many (prefill): the
pages of this one layer are decoded into a scratch, then `mx.fast` SDPA.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib.metadata import version

import mlx.core as mx

from mlxkv import kernels, tiles
from mlxkv.cache import View
from mlxkv.metal.launch import backend
from mlxkv.quantizers import codebook
from mlxkv.records import TOKENS
from mlxkv.sealed import RecordPages
from mlxkv.transform import Transform

# Up to here the codes are read directly: one token, or a speculative draft to verify.
DECODE_TOKENS = kernels.MOST_NEW
# Head dims that `mx.fast` SDPA prefills without a score matrix, by backend and MLX from that version on, from
# `use_fallback` in MLX's scaled_dot_product_attention.cpp. 192 and 256 have kernels since 0.32.2, which MLX
# chooses on newer GPUs alone; CUDA's are cuDNN's, for 16-bit types.
FUSED_DIMS = {
    "metal": {(0, 0, 0): {64, 80, 128}, (0, 32, 1): {64, 72, 80, 96, 128}},
    "cuda": {(0, 0, 0): set(range(8, 129, 8))},
    "cpu": {(0, 0, 0): set()},
}
RUNS = 2  # of pages, each with a basis of its own, that the kernel reads in one pass
# Largest score matrix where MLX has no fused kernel: a CPU gains nothing by more, a GPU needs rows to work on.
SCORE_BYTES, SCORE_BYTES_GPU = 1 << 22, 1 << 26


def attend(
    queries: mx.array,
    view: View,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """queries: [B, H, L, D] -> [B, H, L, Dv].

    mask: None, "causal", boolean (True: attend) or additive, broadcast to [B, H, L, T].
    sinks: [H] logits of attention sinks (gpt-oss).
    """
    if view.sealed:
        queries = mx.depends(queries, list(view.sealed))
    out = _attend(queries, view, scale, mask, sinks)
    return out if view.heard is None else view.heard(queries, out, scale, mask)


def _attend(queries, view, scale, mask, sinks):
    if why_not(queries, view, mask) is None:
        return _decode_records(queries, view, scale, sinks)
    if view.pages is None or queries.shape[2] > DECODE_TOKENS or _in_records(view):
        return _prefill(queries, view, scale, mask, sinks)
    return _decode_codes(queries, view, scale, mask, sinks)


def _in_records(view: View) -> bool:
    return view.pages is not None and type(view.pages.parts[0]) is RecordPages


def why_not(queries: mx.array, view: View, mask: mx.array | str | None) -> str | None:
    """Why the decode kernel does not compute this attention, or None."""
    if not _in_records(view):
        return "the pages are not kept in records" if view.pages else "nothing is sealed yet"
    if queries.shape[2] > DECODE_TOKENS:
        return f"more than {DECODE_TOKENS} new tokens are a prefill"
    if mask is not None and not isinstance(mask, str):
        return "the kernel takes no mask array"
    if len(view.pages.parts) > RUNS:
        return f"more than {RUNS} runs of pages have no kernel"
    return None


def _decode_records(queries, view, scale, sinks):
    sink, live = view.sink, view.live
    count = view.pages.parts[0].tokens // TOKENS
    lengths = ((count, sink[0].shape[2] if sink else 0, live[0].shape[2]),) * queries.shape[0]
    return decode(queries, view.pages.parts, sink, view.buffers or live, lengths, scale, sinks)


def decode(queries, parts, sink, live, lengths, scale, sinks=None, starts=None) -> mx.array:
    """Kernels walk records and windows: codes are read once, nothing is decoded.

    queries: [B, H, L, D] -> [B, H, L, Dv]. parts: runs of pages, at most RUNS. sink, live: (keys,
    values), [B, G, room, D]. lengths, starts: `kernels.attend`.
    """
    batch, heads, new, dims = queries.shape
    kv_heads, dtype = live[0].shape[1], live[0].dtype
    pages, *more = parts
    if pages.tiled:
        return tiles.attend(
            queries.astype(dtype),
            pages.buffer,
            pages.layout,
            _maps(pages),
            sink,
            live,
            lengths,
            scale,
            pages.make,
            sinks=sinks,
            headers=pages.headers,
            second=_tile_run(more[0]) if more else None,
            starts=starts,
        ).astype(queries.dtype)
    q = queries.reshape(batch, kv_heads, -1, dims)
    exact = q.astype(mx.float32)
    first = _run(pages, exact)
    out = kernels.attend(
        first.q_pages,
        q.astype(dtype),
        pages.buffer,
        pages.layout,
        sink,
        live,
        lengths,
        scale,
        new,
        pages.make,
        up=first.up,
        sinks=sinks,
        headers=pages.headers,
        second=_run(more[0], exact) if more else None,
        starts=starts,
    )
    return out.reshape(batch, heads, new, -1).astype(queries.dtype)


def _key_map(pages: RecordPages) -> Transform | None:
    """What queries go through before they meet the codes of the keys."""
    keys = pages.codecs[0]
    if pages.layout.keys.signs:
        return codebook.with_signs(keys.spec, keys.dims, keys.transform)
    return keys.transform


def _maps(pages: RecordPages) -> tuple[Transform | None, Transform | None]:
    return _key_map(pages), pages.codecs[1].transform


def _tile_run(pages: RecordPages) -> tiles.Run:
    return tiles.Run(pages.buffer, pages.tokens // TOKENS, _maps(pages), pages.headers)


def _run(pages: RecordPages, q: mx.array) -> kernels.Run:
    """q: [B, G, N, D] float32."""
    key_map, values = _maps(pages)
    stored = q if key_map is None else key_map.query(q)
    count = pages.tokens // TOKENS
    return kernels.Run(stored, pages.buffer, count, values and values.up, pages.headers)


def _prefill(queries, view, scale, mask, sinks):
    """The pages of this one layer decoded into a scratch, then `mx.fast` SDPA.

    Where a transform only turns, windows, queries and outputs are turned, not the pages: they are
    far more tokens. Low rank is led back, since the windows have no stored form.
    """
    runs = view.pages.parts if view.pages else ()
    turns = [code.turn for code in runs[0].codecs] if len(runs) == 1 else [None, None]
    if len(runs) != 1 or any(
        code.transform is not turn for code, turn in zip(runs[0].codecs, turns, strict=True)
    ):
        keys, values = _whole(view, queries.dtype)
        turns = [None, None]
    else:
        sink, live = (
            window and tuple(map(_turned, turns, window, (queries.dtype,) * 2))
            for window in (view.sink, view.live)
        )
        keys, values = view.pages.between(sink, live)
    batch, heads, new, dims = queries.shape
    q = queries
    if turns[0] is not None:
        q = turns[0].turned_query(q.reshape(batch, keys.shape[1], -1, dims)).reshape(queries.shape)
    if not view.plain and not _is_fused(q, values):
        out = _blocked(q, keys, values, scale, mask, sinks)
    else:
        out = mx.fast.scaled_dot_product_attention(
            q, keys, values, scale=scale, mask=mask, sinks=sinks
        )
    if turns[1] is None:
        return out
    out = turns[1].turned_back(out.reshape(batch, keys.shape[1], -1, out.shape[-1]))
    return out.reshape(batch, heads, new, -1)


def _turned(turn, x: mx.array, dtype: mx.Dtype) -> mx.array:
    x = x.astype(dtype)
    return x if turn is None else turn.turned(x)


def _whole(view: View, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Keys and values of all tokens in the model's domain, [B, G, T, D] each."""
    out = []
    for i in range(2):
        parts = [view.live[i]]
        if view.pages is not None:
            parts.insert(0, view.pages.decode(i, dtype))
        if view.sink is not None:
            parts.insert(0, view.sink[i])
        out.append(parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2))
    return out[0], out[1]


def _is_fused(queries: mx.array, values: mx.array) -> bool:
    """Whether `mx.fast` SDPA prefills without a score matrix here."""
    dims, where = queries.shape[-1], backend()
    if values.shape[-1] != dims or (where == "cuda" and queries.dtype == mx.float32):
        return False
    return dims in fused_dims(where)


@cache
def fused_dims(where: str, mlx: str | None = None) -> set[int]:
    """Head dims of the fused prefill on this backend in a version of MLX, by default the installed one."""
    mlx = mlx or version("mlx")
    number = tuple(int(n) for n in re.findall(r"\d+", mlx)[:3])
    table = FUSED_DIMS[where]
    return table[max(since for since in table if since <= number)]


def _blocked(queries, keys, values, scale, mask, sinks):
    """SDPA by blocks of query rows, so that the score matrix stays below SCORE_BYTES, or has DECODE_TOKENS
    rows."""
    heads, new, total = queries.shape[1], queries.shape[2], keys.shape[2]
    most = SCORE_BYTES if backend() == "cpu" else SCORE_BYTES_GPU
    rows = max(DECODE_TOKENS, most // (4 * queries.shape[0] * heads * total))
    out = []
    for start in range(0, new, rows):
        stop = min(start + rows, new)
        end = total - new + stop if isinstance(mask, str) else total  # causal: the rest is masked
        part = mask
        if isinstance(mask, mx.array) and mask.ndim > 1 and mask.shape[-2] > 1:
            part = mask[..., start:stop, :]
        q, k, v = queries[:, :, start:stop], keys[:, :, :end], values[:, :, :end]
        if out:  # one block after the other, or all score matrices are alive at once
            q = mx.depends(q, out[-1])
        block = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=part, sinks=sinks)
        out.append(block)
    return out[0] if len(out) == 1 else mx.concatenate(out, axis=2)


def _decode_codes(queries, view, scale, mask, sinks):
    """The same by products with codes: scores of the three parts side by side, one softmax, three
    mixtures."""
    batch, heads, new, dims = queries.shape
    kv_heads = view.live[0].shape[1]
    # All query heads of a kv head in one product: [B, G, H/G * L, D].
    q = (queries.astype(mx.float32) * scale).reshape(batch, kv_heads, -1, dims)
    s = scores(q, view).reshape(batch, heads, new, -1)
    p = _softmax(s, mask, sinks).reshape(batch, kv_heads, -1, s.shape[-1])

    out, start = None, 0
    mixers = [
        (run.tokens, lambda x, run=run: run.codecs[1].mix(x, run.stored[1]))
        for run in view.pages.parts
    ]
    for at, window in ((0, view.sink), (len(mixers) + 1, view.live)):
        if window is not None:
            values = window[1].astype(mx.float32)
            mixers.insert(at, (values.shape[2], lambda x, v=values: x @ v))
    for length, mixer in mixers:
        part = mixer(p[..., start : start + length])
        out = part if out is None else out + part
        start += length
    return out.reshape(batch, heads, new, -1).astype(queries.dtype)


def scores(q: mx.array, view: View) -> mx.array:
    """q: [B, G, N, D] float32 -> its products with the keys of sink, pages and live: [B, G, N, T]."""
    return scorer(view)(q)


def scorer(view: View) -> Callable[[mx.array], mx.array]:
    """`scores` for several q: what is decoded for them is decoded once."""
    parts = [run.scorer() for run in view.pages.parts] if view.pages else []
    for at, window in ((0, view.sink), (len(parts) + 1, view.live)):
        if window is not None:
            keys = window[0].astype(mx.float32).swapaxes(-1, -2)
            parts.insert(at, lambda q, keys=keys: q @ keys)
    return lambda q: (
        parts[0](q) if len(parts) == 1 else mx.concatenate([part(q) for part in parts], axis=-1)
    )


def masked(scores: mx.array, mask: mx.array | str | None) -> mx.array:
    """scores: [B, H, L, T] float32, of new tokens that are the last ones; mask as in `attend`."""
    new, total = scores.shape[2:]
    if isinstance(mask, str):
        if mask != "causal":
            raise ValueError(f"[attend] unknown mask; got {mask!r}; choose causal, or an array")
        mask = mx.arange(total - new, total)[:, None] >= mx.arange(total)[None] if new > 1 else None
    if mask is not None:
        if mask.dtype == mx.bool_:
            # Not -inf: a row that may see nothing (left padding) must not become NaN.
            scores = mx.where(mask, scores, mx.finfo(mx.float32).min)
        else:
            scores = scores + mask.astype(mx.float32)
    return scores


def _softmax(scores, mask, sinks):
    """scores: [B, H, L, T] float32; the column of the attention sinks takes part and is dropped."""
    scores, total = masked(scores, mask), scores.shape[3]
    if sinks is None:
        return mx.softmax(scores, axis=-1, precise=True)
    column = mx.broadcast_to(sinks.astype(mx.float32)[None, :, None, None], (*scores.shape[:3], 1))
    return mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1, precise=True)[..., :total]
