"""Page headers: the numbers that the tokens of a page share, beside the records of its tokens.

One row of uint32 words per page and kv head, keys before values. The order is explained in
`metal/codes.h`. Torch ops, for saved caches.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from cuda_track.records import SideLayout
from mlxkv.formats_codebook import TREE_BITS

TREE_ANGLES = sum(2**bits for bits in TREE_BITS)  # of the codebooks of a page


def pack(stored: dict[str, torch.Tensor], at: SideLayout) -> torch.Tensor:
    """The shared numbers of a side, float16 [B, G, P rows, R or R/2] -> [B, G, P, header words]."""
    rows = at.header_rows
    parts = [
        x.reshape(*x.shape[:2], -1, rows, x.shape[3])
        for x in (stored[name] for name in at.header_names)
    ]
    x = torch.stack(parts, -2)  # [B, G, P, rows, names, R]
    x = pad(x, (0, at.header_dims - x.shape[-1]))
    return x.reshape(*x.shape[:3], -1).contiguous().view(torch.int32)


def unpack(words: torch.Tensor, at: SideLayout) -> dict[str, torch.Tensor]:
    """The inverse of `pack`."""
    batch, heads, pages, _ = words.shape
    rows, names = at.header_rows, at.header_names
    x = words.contiguous().view(torch.float16)
    x = x.reshape(batch, heads, pages * rows, len(names), at.header_dims)
    x = x[..., : TREE_ANGLES if at.tree else at.dims]
    return {name: x[..., i, :] for i, name in enumerate(names)}
