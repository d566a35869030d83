"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), as DeepSeek-V3's class has it."""

import torch
import torch.nn as nn
from configs import Config
from parts import RMSNorm, attend
from torch import Tensor


class LatentAttention(nn.Module):
    """Attention whose keys and values of all heads are made from one latent a token, and one rotary key.

    A head's key is `head_dim - rope` dims of the latent's and the rotary key's `rope`; its value has
    `head_dim` dims, so that flash attention takes both.
    """

    window = None  # of no layer

    def __init__(self, config: Config):
        super().__init__()
        c = config
        self.config, self.theta = c, c.theta
        self.attend = attend  # may be replaced by another that computes the same
        self.q_proj = nn.Linear(c.width, c.heads * c.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.width, c.rank + c.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(c.rank, c)
        self.kv_b_proj = nn.Linear(c.rank, c.heads * (2 * c.head_dim - c.rope), bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.width, bias=False)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, H, L, D], and what is cached of x [B, L, width]: latents [B, 1, L, rank] and rotary
        keys [B, 1, L, rope]. rope: cos and sin [L, rope]."""
        c, (B, L, _) = self.config, x.shape
        q = self.q_proj(x).view(B, L, c.heads, c.head_dim).transpose(1, 2)
        own, turned = q.split([c.head_dim - c.rope, c.rope], dim=-1)
        latents, key = self.kv_a_proj_with_mqa(x)[:, None].split([c.rank, c.rope], dim=-1)
        q = torch.cat([own, rotate_pairs(turned, *rope)], dim=-1)
        return q, self.kv_a_layernorm(latents), rotate_pairs(key, *rope)

    def expand(self, latents: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, H, T, D] of latents [B, 1, T, rank] and rotary keys [B, 1, T, rope]."""
        c, (B, _, T, _) = self.config, latents.shape
        both = self.kv_b_proj(latents[:, 0]).view(B, T, c.heads, -1).transpose(1, 2)
        own, values = both.split([c.head_dim - c.rope, c.head_dim], dim=-1)
        return torch.cat([own, turned.expand(-1, c.heads, -1, -1)], dim=-1), values

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask) -> Tensor:
        q, *cached = self.project(x, rope)
        out = self.attend(q, *self.expand(*cached), mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to x [B, H, L, N], whose pairs are neighbours, as DeepSeek's are.

    The result has the first of all pairs, then the second, as transformers leaves it; scores do not depend on it.
    """
    half = x.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    x1, x2 = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)
