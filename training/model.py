"""The architectures in PyTorch, with the parameter names of the Hugging Face classes."""

from dataclasses import asdict

import torch
import torch.nn as nn
import torch.nn.functional as F
from configs import Config
from mla import LatentAttention
from parts import RMSNorm, attend, rotary, rotate, window_mask
from torch import Tensor


class Attention(nn.Module):
    def __init__(self, config: Config, layer: int):
        super().__init__()
        c, bias = config, not config.gemma
        self.config, self.window = c, c.window if c.local(layer) else None
        self.theta = c.theta_local if c.local(layer) else c.theta
        self.attend = attend  # may be replaced by another that computes the same
        self.q_proj = nn.Linear(c.width, c.heads * c.head_dim, bias=bias)
        self.k_proj = nn.Linear(c.width, c.kv_heads * c.head_dim, bias=bias)
        self.v_proj = nn.Linear(c.width, c.kv_heads * c.head_dim, bias=bias)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.width, bias=False)
        if c.gemma:
            self.q_norm = RMSNorm(c.head_dim, c, gain=c.gain)
            self.k_norm = RMSNorm(c.head_dim, c, gain=c.gain)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, H, L, D], k and v [B, G, L, D] of x [B, L, width]; rope: cos and sin [L, D]."""
        c, (B, L, _) = self.config, x.shape
        q = self.q_proj(x).view(B, L, c.heads, c.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, L, c.kv_heads, c.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, L, c.kv_heads, c.head_dim).transpose(1, 2)
        if c.gemma:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, *rope), rotate(k, *rope), v

    @staticmethod
    def expand(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of what is cached: the same."""
        return keys, values

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask) -> Tensor:
        out = self.attend(*self.project(x, rope), mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gelu = config.gemma
        self.gate_proj = nn.Linear(config.width, config.ff, bias=False)
        self.up_proj = nn.Linear(config.width, config.ff, bias=False)
        self.down_proj = nn.Linear(config.ff, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)
        return self.down_proj(gate * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.gemma = config.gemma
        self.self_attn = LatentAttention(config) if config.latent else Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.width, config)
        self.post_attention_layernorm = RMSNorm(config.width, config)
        if self.gemma:  # Gemma normalises before and after each half
            self.pre_feedforward_layernorm = RMSNorm(config.width, config)
            self.post_feedforward_layernorm = RMSNorm(config.width, config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask) -> Tensor:
        return self.add(x, self.self_attn(self.input_layernorm(x), rope, mask))

    def add(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the residual stream after attention and MLP."""
        if self.gemma:
            x = x + self.post_attention_layernorm(attended)
            return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """A decoder; `model.state_dict()` has the names of the Hugging Face checkpoint."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab, config.width)
        self.model.layers = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.model.norm = RMSNorm(config.width, config)
        # Gemma rounds this factor to bfloat16, and mlx-lm does so in every dtype.
        self.scale = torch.tensor(config.width**0.5).bfloat16().item() if config.gemma else 1.0
        self.reset()

    def reset(self) -> None:
        """Initialise with normal weights; with `offsets` also with large constant K channels."""
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        if self.config.kind != "qwen2" or not self.config.offsets:
            return
        low = torch.Generator().manual_seed(1)
        for block in self.model.layers:
            bias = block.self_attn.k_proj.bias.data.view(self.config.kv_heads, self.config.head_dim)
            for head in bias:
                pairs = (
                    52 + torch.randperm(12, generator=low)[:3]
                )  # slow pairs, which hardly rotate
                sides = torch.randint(0, 2, (3,), generator=low)
                signs = 2 * torch.randint(0, 2, (3,), generator=low) - 1
                head[pairs + 64 * sides] = signs * torch.tensor([15.0, 12.0, 9.0])

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.embed_tokens(ids) * self.scale

    def forward(self, ids: Tensor) -> Tensor:
        """Return the final hidden states [B, L, width] of token ids [B, L]."""
        x, (length, device) = self.embed(ids), (ids.shape[1], str(ids.device))
        for block in self.model.layers:
            attention = block.self_attn
            rope = rotary(length, self.config.turned, attention.theta, device)
            local = attention.window is not None and length > attention.window
            x = block(x, rope, window_mask(length, attention.window, device) if local else None)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)

    def describe(self) -> dict:
        return asdict(self.config) | {"parameters": sum(p.numel() for p in self.parameters())}
