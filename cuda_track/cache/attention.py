"""`attend(q, view)`: attention over sink | pages | recent.

Without pages torch SDPA reads plain tensors. A few new tokens take a Triton kernel that reads codes,
or plain products with them. Many (prefill) decode the pages of this one layer into a scratch, in the
stored domain, for torch SDPA.
"""

from __future__ import annotations

from functools import reduce
from weakref import ref

import torch
from torch.nn.functional import scaled_dot_product_attention

from cuda_track.cache.view import Pair, View
from cuda_track.codec.codec import QuantizedPages, both
from cuda_track.kernels import launch
from cuda_track.kernels.pool import PoolPages

# Up to here the codes are read directly: one token, or a speculative draft to verify.
DECODE_TOKENS = 8
Mask = torch.Tensor | str | None


def attend(
    queries: torch.Tensor,
    view: View,
    scale: float,
    mask: Mask = None,
    sink_logits: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend with queries: [B, H, L, D] -> [B, H, L, Dv].

    mask: None, "causal", boolean (True: attend) or additive, broadcast to [B, H, L, T].
    sink_logits: [H], of attention sinks (gpt-oss). softcap: scores are bent to stay below it (Gemma 2).
    """
    new, extra = queries.shape[2], (sink_logits, softcap)
    if isinstance(view.pages, PoolPages) and why_not(queries, view, mask) is None:
        row = causal_row(mask, new) if isinstance(mask, torch.Tensor) else None
        out = launch.attend(queries, view.pages, view.sink, view.recent, scale, row, *extra)
    elif view.pages is not None and new <= DECODE_TOKENS:
        out = decode_codes(queries, view, scale, mask, *extra)
    else:
        out = _prefill(queries, view, scale, mask, *extra)
    if view.observer is not None:
        view.observer(queries, scale, mask)
    return out


def why_not(queries: torch.Tensor, view: View, mask: Mask) -> str | None:
    """Return why the decode kernel does not compute this attention, or None."""
    if type(view.pages) is not PoolPages:
        return "the pages are not kept in a pool" if view.pages else "nothing is quantized yet"
    new = queries.shape[2]
    if new > DECODE_TOKENS:
        return f"more than {DECODE_TOKENS} new tokens are a prefill"
    if queries.shape[1] // view.recent[0].shape[1] * new > launch.ROWS:
        return f"a kv head with more than {launch.ROWS} rows of queries"
    if isinstance(mask, torch.Tensor) and causal_row(mask, new) is None:
        return "the kernel takes one boolean row of a mask, and causal ones"
    return None if mask is not None or new == 1 else "without a causal mask"


def causal_row(mask: torch.Tensor, new: int) -> torch.Tensor | None:
    """Return the tokens that may be seen at all, [B, T], if `mask` says that and is causal among `new` tokens;
    else None. A mask of several tokens is examined once: layers share it."""
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1:3] != (1, new):
        return None
    if new == 1:
        return mask[:, 0, 0]
    examined = _examined[-1] if _examined else None
    if examined is None or examined[0]() is not mask or examined[1] != mask._version:
        row = mask[:, :, -1:]
        is_causal = torch.equal(mask, row & causal(new, mask.shape[3], mask.device))
        _examined[:] = [(ref(mask), mask._version, row[:, 0, 0] if is_causal else None)]
    return _examined[-1][2]


_examined: list[tuple] = []  # (weak reference to the last mask, its version, the result)


def _prefill(queries, view: View, scale, mask: Mask, sink_logits, softcap):
    """Decode the pages of this one layer into a scratch for torch SDPA.

    If the transforms are square, windows, queries and outputs are transformed, not the pages: those are far more
    tokens. Else pages are transformed back, since windows lose nothing.
    """
    args, dtype = (scale, mask, sink_logits, softcap), queries.dtype
    runs = view.pages.parts if view.pages else ()
    if len(runs) != 1 or not all(code.is_square for code in runs[0].codecs):
        return _plain(queries, *_whole(view, dtype), *args)
    keys, values = (_stored(view, runs[0], side, dtype) for side in (0, 1))
    (of_keys, of_values), kv_heads = (code.transform for code in runs[0].codecs), keys.shape[1]
    if of_keys is not None:
        rows = _heads_together(queries, kv_heads)
        queries = of_keys.query(rows, dtype).reshape(queries.shape)
    out = _plain(queries, keys, values, *args)
    if of_values is not None:
        out = of_values.restore(_heads_together(out, kv_heads), dtype).reshape(out.shape)
    return out


def _whole(view: View, dtype: torch.dtype) -> Pair:
    """Return keys and values of all tokens in the model's domain, [B, G, T, D] each."""
    pages = view.pages
    if not isinstance(pages, PoolPages):
        return view.whole(dtype)

    def joined(side: int) -> torch.Tensor:
        code, window = pages.codecs[side], view.recent[side]
        out = window.new_empty(*window.shape[:2], pages.tokens, code.dims, dtype=torch.float32)
        launch.dequantize(pages, side, out, 0)
        restored = out if code.transform is None else code.transform.restore(out)
        *sink, recent = (pair[side].to(dtype) for pair in view.windows)
        return torch.cat([*sink, restored.to(dtype), recent], 2)

    return both(joined, (0, 1))


def _heads_together(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Put the heads of a kv head side by side: [B, H, L, D] -> [B, G, H/G L, D]."""
    return x.reshape(x.shape[0], kv_heads, -1, x.shape[3])


def _stored(view: View, pages: QuantizedPages, side: int, dtype: torch.dtype) -> torch.Tensor:
    """Return sink | pages | recent in the stored domain: [B, G, T, R] in `dtype`."""
    code, recent = pages.codecs[side], view.recent[side]
    out = recent.new_empty(*recent.shape[:2], view.tokens, code.dims, dtype=dtype)
    first = 0 if view.sink is None else view.sink[side].shape[2]
    last = first + pages.tokens
    for start, pair in ((0, view.sink), (last, view.recent)):
        if pair is not None:
            x = pair[side] if code.transform is None else code.transform.store(pair[side], dtype)
            out[:, :, start : start + x.shape[2]] = x
    if isinstance(pages, PoolPages):
        launch.dequantize(pages, side, out, first)
    else:
        out[:, :, first:last] = code.decode_stored(pages.stored[side], dtype)
    return out


def _plain(queries, keys, values, scale, mask: Mask, sink_logits, softcap):
    """Attend by torch SDPA, or by plain products where it is more than softmax."""
    if sink_logits is not None or softcap is not None:
        q = _heads_together(queries.float(), keys.shape[1]) * scale
        scores = (q @ keys.float().mT).reshape(*queries.shape[:3], -1)
        p = _softmax(scores, mask, sink_logits, softcap).reshape(*q.shape[:3], -1)
        return (p @ values.float()).reshape(*queries.shape[:3], -1).to(queries.dtype)
    new, total = queries.shape[2], keys.shape[2]
    named = _is_causal(mask) and new > 1
    if named and new != total:
        from torch.nn.attention.bias import causal_lower_right  # which imports half of torch

        mask = causal_lower_right(new, total)  # no matrix: flash attention takes none
    elif isinstance(mask, str):
        mask = None
    elif mask is not None and mask.dtype != torch.bool:
        mask = mask.to(queries.dtype)
    if new == 1 and mask is None:  # query heads as rows of their kv head: keys are read once
        rows = _heads_together(queries, keys.shape[1])
        return scaled_dot_product_attention(rows, keys, values, scale=scale).reshape(
            *queries.shape[:3], values.shape[3]
        )
    return scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=named and new == total,
        scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )


def decode_codes(queries, view: View, scale, mask: Mask, sink_logits=None, softcap=None):
    """Attend by products with codes: scores of all parts side by side, one softmax, mixtures."""
    p = weights(queries, view, scale, mask, sink_logits, softcap)
    p, parts, start = _heads_together(p, view.recent[0].shape[1]), [], 0
    for length, mix in _in_order(
        view,
        lambda window: (window[1].shape[2], lambda x: x @ window[1].float()),
        lambda run: (run.tokens, lambda x: run.codecs[1].mix(x, run.stored[1])),
    ):
        parts.append(mix(p[..., start : start + length]))
        start += length
    return reduce(torch.add, parts).reshape(*queries.shape[:3], -1).to(queries.dtype)


def weights(queries, view: View, scale, mask: Mask, sink_logits=None, softcap=None):
    """Return the weights of attention, as `attend` takes its arguments: [B, H, L, T] float32."""
    q = _heads_together(queries.float(), view.recent[0].shape[1]) * scale
    s = scores(q, view).reshape(*queries.shape[:3], -1)
    return _softmax(s, mask, sink_logits, softcap)


def scores(q: torch.Tensor, view: View) -> torch.Tensor:
    """Multiply q [B, G, N, D] float32 with the keys of sink, pages and recent: [B, G, N, T]."""
    parts = _in_order(
        view,
        lambda window: q @ window[0].float().mT,
        lambda run: run.codecs[0].scores(q, run.stored[0]),
    )
    return torch.cat(parts, -1)


def _in_order(view: View, window, run) -> list:
    """Return the results of `window` for sink and recent, of `run` for each run of pages between them."""
    *sink, recent = map(window, view.windows)
    return [*sink, *map(run, view.pages.parts if view.pages else ()), recent]


def masked(scores: torch.Tensor, mask: Mask) -> torch.Tensor:
    """Mask scores [B, H, L, T] float32 of the last L tokens; mask as in `attend`."""
    new, total = scores.shape[2:]
    if isinstance(mask, str):
        mask = causal(new, total, scores.device) if _is_causal(mask) and new > 1 else None
    if mask is not None and mask.dtype == torch.bool:
        # Not -inf: a row that may see nothing (left padding) must not become NaN.
        return scores.masked_fill(~mask, torch.finfo(torch.float32).min)
    return scores if mask is None else scores + mask.float()


def _softmax(
    scores: torch.Tensor, mask: Mask, sink_logits: torch.Tensor | None, softcap: float | None = None
) -> torch.Tensor:
    """Softmax of scores [B, H, L, T] float32; the column of attention sinks takes part and is dropped."""
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores, total = masked(scores, mask), scores.shape[3]
    if sink_logits is None:
        return scores.softmax(-1)
    column = sink_logits.float()[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :total]


def _is_causal(mask: Mask) -> bool:
    if isinstance(mask, str) and mask != "causal":
        raise ValueError(f"[attend] unknown mask; got {mask!r}; choose causal, or a tensor")
    return isinstance(mask, str)


def causal(new: int, total: int, device: torch.device) -> torch.Tensor:
    """Return the causal mask [L, T] of the last L tokens."""
    rows = torch.arange(total - new, total, device=device)
    return rows[:, None] >= torch.arange(total, device=device)
