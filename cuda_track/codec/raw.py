"""Numbers instead of codes: full precision (`fp16/int4` keeps its keys so), or float16 of low rank."""

from __future__ import annotations

import torch

from mlxkv.formats.config import Full, Half
from mlxkv.formats.quantizers import HALF_MAX


def encode(spec: Full | Half, x: torch.Tensor, page: int) -> dict[str, torch.Tensor]:
    """x: [B, G, T, R]."""
    return {"values": x.clamp(-HALF_MAX, HALF_MAX).half() if isinstance(spec, Half) else x}


def decode(
    spec: Full | Half, stored: dict[str, torch.Tensor], dims: int, page: int, dtype: torch.dtype
) -> torch.Tensor:
    """[B, G, T, R] in `dtype`."""
    return stored["values"].to(dtype)
