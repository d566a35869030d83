"""Numbers instead of codes: full precision (`fp16/int4` keeps its keys so), or float16 of low rank."""

from __future__ import annotations

import torch

from mlxkv.formats.quantizers import HALF_MAX, Full, Half


def encode(quantizer: Full | Half, x: torch.Tensor, page: int) -> dict[str, torch.Tensor]:
    """x: [B, G, T, R]."""
    return {"values": x if quantizer.exact else x.clamp(-HALF_MAX, HALF_MAX).half()}


def decode(
    quantizer: Full | Half,
    stored: dict[str, torch.Tensor],
    dims: int,
    page: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[B, G, T, R] in `dtype`."""
    return stored["values"].to(dtype)


def join(
    quantizer: Full | Half, codes: torch.Tensor, numbers: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Read the float16 numbers whose bits page records hold, [B, G, T, R]."""
    return {"values": codes.to(torch.int16).contiguous().view(torch.float16)}
