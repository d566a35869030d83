"""Page headers: the numbers that the tokens of a page share, beside the records of its tokens.

One row of uint32 words per page and kv head, keys before values. The order is explained in
`metal/codes.h`. Plain MLX ops, for encoding, saving and loading.
"""

from __future__ import annotations

import mlx.core as mx

from mlxkv.formats_codebook import TREE_BITS
from mlxkv.records import SideLayout

TREE_ANGLES = sum(2**bits for bits in TREE_BITS)  # of the codebooks of a page


def pack(stored: dict[str, mx.array], at: SideLayout) -> mx.array:
    """The shared numbers of a side, float16 [B, G, P rows, R or R/2] -> [B, G, P, header words]."""
    rows = at.header_rows
    parts = [
        x.reshape(*x.shape[:2], -1, rows, x.shape[3])
        for x in (stored[name] for name in at.header_names)
    ]
    x = mx.stack(parts, axis=-2)  # [B, G, P, rows, names, R]
    pad = at.header_dims - x.shape[-1]
    if pad:
        x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)])
    return mx.contiguous(x).reshape(*x.shape[:3], -1).view(mx.uint32)


def unpack(words: mx.array, at: SideLayout) -> dict[str, mx.array]:
    """The inverse of `pack`."""
    batch, heads, pages, _ = words.shape
    rows, names = at.header_rows, at.header_names
    x = mx.contiguous(words).view(mx.float16)
    x = x.reshape(batch, heads, pages * rows, len(names), at.header_dims)[
        ..., : TREE_ANGLES if at.tree else at.dims
    ]
    return {name: x[..., i, :] for i, name in enumerate(names)}
