"""`attend(q, view)`: attention over sink | pages | live.

No pages: torch SDPA on plain tensors. A few new tokens: a Triton kernel that reads codes, or plain
products with them. Many (prefill): the pages of this one layer are decoded into a scratch, then
torch SDPA.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from cuda_track import kernels
from cuda_track.cache import View
from cuda_track.kernels.pool import PoolPages

# Up to here the codes are read directly: one token, or a speculative draft to verify.
DECODE_TOKENS = 8
Mask = torch.Tensor | str | None


def attend(
    queries: torch.Tensor,
    view: View,
    scale: float,
    mask: Mask = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """queries: [B, H, L, D] -> [B, H, L, Dv].

    mask: None, "causal", boolean (True: attend) or additive, broadcast to [B, H, L, T].
    sinks: [H] logits of attention sinks (gpt-oss).
    """
    if why_not(queries, view, mask) is None:
        seen = None if mask is None or isinstance(mask, str) else mask[:, 0, 0]
        return kernels.attend(queries, view.pages, view.sink, view.live, scale, seen, sinks)
    if view.pages is None or queries.shape[2] > DECODE_TOKENS:
        return _prefill(queries, view, scale, mask, sinks)
    return _decode_codes(queries, view, scale, mask, sinks)


def why_not(queries: torch.Tensor, view: View, mask: Mask) -> str | None:
    """Why the decode kernel does not compute this attention, or None."""
    if type(view.pages) is not PoolPages:
        return "the pages are not kept in a pool" if view.pages else "nothing is sealed yet"
    new = queries.shape[2]
    if new > DECODE_TOKENS:
        return f"more than {DECODE_TOKENS} new tokens are a prefill"
    if queries.shape[1] // view.live[0].shape[1] * new > kernels.ROWS:
        return f"a kv head with more than {kernels.ROWS} rows of queries"
    if isinstance(mask, torch.Tensor) and (mask.dtype != torch.bool or mask.shape[1:3] != (1, 1)):
        return "the kernel takes one boolean row of a mask"
    return None if mask is not None or new == 1 else "without a causal mask"


def _prefill(queries, view: View, scale, mask: Mask, sinks):
    """The pages of this one layer decoded into a scratch, then torch SDPA."""
    keys, values = view.whole(queries.dtype)
    if sinks is not None:
        return _exact(queries, keys, values, scale, mask, sinks)
    new, total = queries.shape[2], keys.shape[2]
    causal = _is_causal(mask) and new > 1
    if isinstance(mask, str):
        mask = _causal(new, total, queries.device) if causal and new != total else None
    elif mask is not None and mask.dtype != torch.bool:
        mask = mask.to(queries.dtype)
    return scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=causal and new == total,
        scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )


def _exact(queries, keys, values, scale, mask: Mask, sinks):
    """softmax(scale q k^T + mask) v by plain products in float32, attention sinks included."""
    q = _grouped(queries, keys.shape[1]) * scale
    scores = (q @ keys.float().mT).reshape(*queries.shape[:3], -1)
    p = _softmax(scores, mask, sinks).reshape(*q.shape[:3], -1)
    return (p @ values.float()).reshape(*queries.shape[:3], -1).to(queries.dtype)


def _grouped(queries: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """All query heads of a kv head side by side: [B, H, L, D] -> [B, G, H/G L, D] float32."""
    return queries.float().reshape(queries.shape[0], kv_heads, -1, queries.shape[3])


def _decode_codes(queries, view: View, scale, mask: Mask, sinks):
    """The same by products with codes: scores of the three parts side by side, one softmax, three
    mixtures."""
    batch, heads, new, _ = queries.shape
    q = _grouped(queries, view.live[0].shape[1]) * scale
    key_codec, value_codec = view.pages.codecs
    parts = [q @ keys.float().mT for keys, _ in view.windows]
    parts.insert(len(parts) - 1, key_codec.scores(q, view.pages.stored[0]))
    lengths = [part.shape[-1] for part in parts]
    scores = torch.cat(parts, -1).reshape(batch, heads, new, -1)
    p = _softmax(scores, mask, sinks).reshape(*q.shape[:3], -1).split(lengths, -1)
    out = value_codec.mix(p[-2], view.pages.stored[1])
    for part, (_, values) in zip(
        (p[0], p[-1]) if len(p) > 2 else p[-1:], view.windows, strict=True
    ):
        out = out + part @ values.float()
    return out.reshape(batch, heads, new, -1).to(queries.dtype)


def _softmax(scores: torch.Tensor, mask: Mask, sinks: torch.Tensor | None) -> torch.Tensor:
    """scores: [B, H, L, T] float32; the column of the attention sinks takes part and is dropped."""
    new, total = scores.shape[2:]
    if _is_causal(mask):
        mask = _causal(new, total, scores.device) if new > 1 else None
    if mask is not None and mask.dtype == torch.bool:
        # Not -inf: a row that may see nothing (left padding) must not become NaN.
        scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
    elif mask is not None:
        scores = scores + mask.float()
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :total]


def _is_causal(mask: Mask) -> bool:
    if isinstance(mask, str) and mask != "causal":
        raise ValueError(f"[attend] unknown mask; got {mask!r}; choose causal, or a tensor")
    return isinstance(mask, str)


def _causal(new: int, total: int, device: torch.device) -> torch.Tensor:
    """[L, T]: new token i sits at position T - L + i."""
    rows = torch.arange(total - new, total, device=device)
    return rows[:, None] >= torch.arange(total, device=device)
