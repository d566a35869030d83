"""Both architectures in PyTorch, with the parameter names of the Hugging Face classes."""

from dataclasses import asdict, dataclass
from functools import lru_cache

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


@dataclass(frozen=True)
class Config:
    """Shape of a model. Both kinds tie input and output embeddings."""

    kind: str  # "gemma3_text" or "qwen2"
    vocab: int
    width: int
    layers: int
    ff: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    window: int = 512
    theta: float = 1e6
    theta_local: float = 1e4
    eps: float = 1e-6
    pattern: int = 2  # Gemma: every `pattern`-th layer sees everything
    context: int = 8192
    dtype: str = "float16"  # of the exported weights
    gain: float = 1.3  # of q_norm and k_norm at the start
    offsets: bool = True  # Qwen: start with large constant K channels

    @property
    def gemma(self) -> bool:
        return self.kind == "gemma3_text"

    def local(self, layer: int) -> bool:
        """Return whether a layer sees the last `window` tokens only: all but every `pattern`-th layer."""
        return self.gemma and (layer + 1) % self.pattern != 0

    def hub(self) -> dict:
        """Return config.json as transformers and mlx-lm read it."""
        common = {
            "model_type": self.kind,
            "vocab_size": self.vocab,
            "hidden_size": self.width,
            "intermediate_size": self.ff,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": True,
            "attention_dropout": 0.0,
            "use_cache": True,
            "bos_token_id": 1,
            "eos_token_id": [4, 2],
            "pad_token_id": 0,
            "torch_dtype": self.dtype,
        }
        if not self.gemma:
            return common | {
                "architectures": ["Qwen2ForCausalLM"],
                "hidden_act": "silu",
                "use_sliding_window": False,
            }
        return common | {
            "architectures": ["Gemma3ForCausalLM"],
            "hidden_activation": "gelu_pytorch_tanh",
            "head_dim": self.head_dim,
            "query_pre_attn_scalar": self.head_dim,
            "sliding_window": self.window,
            "sliding_window_pattern": self.pattern,
            "layer_types": [
                "sliding_attention" if self.local(i) else "full_attention"
                for i in range(self.layers)
            ],
            "rope_local_base_freq": self.theta_local,
            "attention_bias": False,
        }

    @staticmethod
    def from_hub(config: dict) -> "Config":
        """Read a config.json of this folder's models."""
        return Config(
            kind=config["model_type"],
            vocab=config["vocab_size"],
            width=config["hidden_size"],
            layers=config["num_hidden_layers"],
            ff=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]),
            window=config.get("sliding_window") or 512,
            pattern=config.get("sliding_window_pattern", 2),
            context=config["max_position_embeddings"],
            dtype=config["torch_dtype"],
            offsets=False,  # the weights that follow say what they are
        )


CONFIGS = {
    "tiny": Config("gemma3_text", vocab=3072, width=256, layers=8, ff=736, heads=4, kv_heads=1),
    "tiny-qwen": Config("qwen2", vocab=3072, width=512, layers=5, ff=320, heads=4, kv_heads=2),
}


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
        self.self_attn = Attention(config, layer)
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
        if self.config.gemma or not self.config.offsets:
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
            rope = rotary(length, self.config.head_dim, attention.theta, device)
            local = attention.window is not None and length > attention.window
            x = block(x, rope, window_mask(length, attention.window, device) if local else None)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)

    def describe(self) -> dict:
        return asdict(self.config) | {"parameters": sum(p.numel() for p in self.parameters())}
