"""What the models of all kinds have: rotary embeddings, masks, attention, the norm."""

from functools import lru_cache

import torch
import torch.nn as nn
import torch.nn.functional as F
from configs import Config
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


@lru_cache(maxsize=16)
def rotary(length: int, dim: int, theta: float, device: str) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [length, dim], of the half-split rotary embedding."""
    inverse = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
    angles = torch.cat([angles, angles], dim=-1).to(device)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to x [B, H, L, D]."""
    x1, x2 = x.chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-x2, x1], dim=-1).float() * sin).to(x.dtype)


@lru_cache(maxsize=8)
def window_mask(length: int, window: int, device: str) -> BlockMask | Tensor:
    """Make the causal mask over the last `window` tokens: for flex_attention, or on a CPU for SDPA."""

    def visible(b, h, q, k):
        return (q >= k) & (q - k < window)

    if device.startswith("cuda"):
        return create_block_mask(visible, None, None, length, length, device=device)
    at = torch.arange(length)
    return visible(0, 0, at[:, None], at)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Tensor | None) -> Tensor:
    """Attend from q [B, H, L, D] to k and v [B, G, L, D], causally if there is no mask."""
    if isinstance(mask, BlockMask):
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )


class RMSNorm(nn.Module):
    """RMS norm with gain `weight`, or `1 + weight` as in Gemma."""

    def __init__(self, dim: int, config: Config, gain: float = 1.0):
        super().__init__()
        self.offset = 1.0 if config.gemma else 0.0
        self.eps = config.eps
        self.weight = nn.Parameter(torch.full((dim,), gain - self.offset))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return (h * (self.offset + self.weight)).to(x.dtype)
