"""`attend(q, view)`: attention over sink | pages | recent, of one cache or of a batch.

No pages: `mx.fast` SDPA on plain arrays, bit for bit as over an uncompressed cache. A few new
tokens: the backend of the pages (`backends`). Many (prefill): this layer's pages are decoded into scratch memory, then
`mx.fast` SDPA.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib.metadata import version

import mlx.core as mx

from mlxkv.cache.backends import softmax
from mlxkv.cache.view import Pair, RowsView, TracedView, View
from mlxkv.metal import attend as kernels
from mlxkv.metal import gpu
from mlxkv.metal.launch import device_type

# Most new tokens for which codes are read directly: one token, or a speculative draft to verify.
DECODE_TOKENS = kernels.MOST_NEW
# Head dims that `mx.fast` SDPA prefills without a score matrix, by backend and first version of MLX, from
# `use_fallback` in MLX's scaled_dot_product_attention.cpp. 192 and 256 have kernels since 0.32.2, which MLX
# chooses for WIDE alone; CUDA's are cuDNN's, for 16-bit types.
FUSED_DIMS = {
    "metal": {(0, 0, 0): {64, 80, 128}, (0, 32, 1): {64, 72, 80, 96, 128}},
    "cuda": {(0, 0, 0): set(range(8, 129, 8))},
    "cpu": {(0, 0, 0): set()},
}
WIDE, WIDE_TOKENS = 256, 1024  # dims, and new tokens at least, of causal prefills by tensor units
# Largest score matrix where MLX has no fused kernel: more gains nothing on a CPU; a GPU needs many rows.
SCORE_BYTES, SCORE_BYTES_GPU = 1 << 22, 1 << 26


def attend(
    queries: mx.array,
    view: View,
    scale: float,
    mask: mx.array | str | None = None,
    sink_logits: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Attend with queries: [B, H, L, D] -> [B, H, L, Dv].

    mask: None, "causal", boolean (True: attend) or additive, broadcast to [B, H, L, T]; for a batch, an array must
    come from `BatchedKVCache.make_mask`. sink_logits: [H], logits of attention sinks (gpt-oss). softcap: cap of scores
    (Gemma 2).
    """
    view.check(mask)
    if view.quantized:
        queries = mx.depends(queries, list(view.quantized))
    if isinstance(mask, mx.array) and view.lengths is not None:
        view = view.split()
    run: Callable[..., mx.array]
    pages = view.pages
    if isinstance(view, RowsView):
        run = _by_rows
    elif pages is None or queries.shape[2] > DECODE_TOKENS or not pages.backend.reads(pages, mask):
        run = _by_scratch
    else:
        run = pages.backend.attend
    out = run(queries, view, scale, mask, sink_logits, softcap)
    return out if view.observer is None else view.observer(queries, out, scale, mask)


def _by_rows(queries, view: RowsView, scale, mask, sink_logits, softcap):
    """Compute `attend` sequence by sequence."""
    new, out = queries.shape[2], []
    skips, padding = view.skips or (0,) * len(view.rows), view.padding
    for i, (row, skip) in enumerate(zip(view.rows, skips, strict=True)):
        if row is None:
            out.append(None)
            continue
        alone, n = row[0], new - skip if row[1] is None else row[1]
        part = mask
        if isinstance(mask, mx.array):
            start = 0 if padding is None else padding[i]
            columns = slice(start, start + alone.columns)
            part = mask[min(i, mask.shape[0] - 1)][None, :, skip : skip + n, columns]
        elif n == 1:
            part = None
        q = queries[i : i + 1, :, skip : skip + n]
        mixed = attend(q, alone, scale, part, sink_logits, softcap)
        around = (skip, new - skip - n)
        out.append(mx.pad(mixed, [(0, 0), (0, 0), around, (0, 0)]) if any(around) else mixed)
    dims = next((x.shape[3] for x in out if x is not None), view.recent[1].shape[3])
    nothing = mx.zeros((1, queries.shape[1], new, dims), queries.dtype)
    return mx.concatenate([nothing if x is None else x for x in out])


def _by_scratch(queries, view, scale, mask, sink_logits, softcap):
    """Decode this layer's pages into scratch memory, then compute `mx.fast` SDPA.

    If a transform is square, transform windows, queries and outputs, not the many tokens of the pages. Pages of low
    rank are restored, since the windows have no stored form.
    """
    transforms = view.pages.square_transforms if view.pages else None
    if transforms is None:
        keys, values = decode_all(view, queries.dtype)
        transforms = None, None
    else:
        sink, recent = (
            window and tuple(map(_transformed, transforms, window, (queries.dtype,) * 2))
            for window in (view.sink, view.recent)
        )
        keys, values = view.pages.between(sink, recent)
    batch, heads, new, dims = queries.shape
    q, mask = queries, view.visible(mask, new)
    if transforms[0] is not None:
        q = (
            transforms[0]
            .transform_query(q.reshape(batch, keys.shape[1], -1, dims))
            .reshape(queries.shape)
        )
    at_once = view.plain or isinstance(view, TracedView) or _is_fused(q, values, mask)
    if softcap is not None or not at_once:
        out = _blocked(q, keys, values, scale, mask, sink_logits, softcap)
    else:
        out = mx.fast.scaled_dot_product_attention(
            q, keys, values, scale=scale, mask=mask, sinks=sink_logits
        )
    if transforms[1] is None:
        return out
    out = transforms[1].inverse(out.reshape(batch, keys.shape[1], -1, out.shape[-1]))
    return out.reshape(batch, heads, new, -1)


def _transformed(transform, x: mx.array, dtype: mx.Dtype) -> mx.array:
    x = x.astype(dtype)
    return x if transform is None else transform.apply(x)


def decode_all(view: View, dtype: mx.Dtype) -> Pair:
    """Return keys and values of all tokens as the model sees them, [B, G, T, D] each."""
    return whole_side(view, 0, dtype), whole_side(view, 1, dtype)


def whole_side(view: View, side: int, dtype: mx.Dtype) -> mx.array:
    """Return keys (side 0) or values (1) of all tokens as the model sees them, [B, G, T, D]."""
    parts = [] if view.sink is None else [view.sink[side]]
    if view.pages is not None:
        parts.append(view.pages.decode(side, dtype))
    return mx.concatenate([*parts, view.recent[side]], axis=2) if parts else view.recent[side]


def _is_fused(queries: mx.array, values: mx.array, mask: mx.array | str | None) -> bool:
    """Return whether `mx.fast` SDPA prefills without a score matrix here."""
    new, dims, device = *queries.shape[-2:], device_type()
    if values.shape[-1] != dims or (device == "cuda" and queries.dtype == mx.float32):
        return False
    if device == "metal" and dims == WIDE and isinstance(mask, str) and new >= WIDE_TOKENS:
        return queries.dtype != mx.float32 and _mlx() >= (0, 32, 2) and gpu.has_tensor_units()
    return dims in fused_dims(device)


@cache
def fused_dims(device: str, mlx: str | None = None) -> set[int]:
    """Return the head dims with a fused prefill on this backend in version `mlx` (None: the installed one)."""
    number, table = _mlx(mlx), FUSED_DIMS[device]
    return table[max(since for since in table if since <= number)]


@cache
def _mlx(mlx: str | None = None) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", mlx or version("mlx"))[:3])


def _blocked(queries, keys, values, scale, mask, sink_logits, softcap=None):
    """Compute SDPA in blocks of query rows, with score matrices below SCORE_BYTES or of DECODE_TOKENS rows."""
    heads, new, total = queries.shape[1], queries.shape[2], keys.shape[2]
    score_bytes = SCORE_BYTES if device_type() == "cpu" else SCORE_BYTES_GPU
    rows = max(DECODE_TOKENS, score_bytes // (4 * queries.shape[0] * heads * total))
    out = []
    for start in range(0, new, rows):
        stop = min(start + rows, new)
        end = total - new + stop if isinstance(mask, str) else total  # causal: the rest is masked
        part = mask
        if isinstance(mask, mx.array) and mask.ndim > 1 and mask.shape[-2] > 1:
            part = mask[..., start:stop, :]
        q, k, v = queries[:, :, start:stop], keys[:, :, :end], values[:, :, :end]
        if out:  # run blocks in sequence, or all score matrices are alive at once
            q = mx.depends(q, out[-1])
        if softcap is not None:
            block = _exact(q, k, v, scale, part, sink_logits, softcap)
        else:
            block = mx.fast.scaled_dot_product_attention(
                q, k, v, scale=scale, mask=part, sinks=sink_logits
            )
        out.append(block)
    return out[0] if len(out) == 1 else mx.concatenate(out, axis=2)


def _exact(queries, keys, values, scale, mask, sink_logits, softcap):
    """Compute softmax(cap(scale q k^T) + mask) v in float32, for cases that `mx.fast` SDPA lacks."""
    batch, heads, new, dims = queries.shape
    q = (queries.astype(mx.float32) * scale).reshape(batch, keys.shape[1], -1, dims)
    s = (q @ keys.astype(mx.float32).swapaxes(-1, -2)).reshape(batch, heads, new, -1)
    p = softmax(s, mask, sink_logits, softcap).reshape(*q.shape[:3], -1)
    return (p @ values.astype(mx.float32)).reshape(batch, heads, new, -1).astype(queries.dtype)
