"""Codebook codes (TurboQuant) by torch ops: x ~ norm * levels[code]. Spec: `mlxkv.spec.codebook`; stored:
`Codebook.tensors`."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from cuda_track.codec import packing
from cuda_track.codec.affine import half
from mlxkv.formats import levels
from mlxkv.formats.quantizers import Codebook


@cache
def _levels(dims: int, bits: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(levels.sphere(dims, bits).astype(np.float32), device=device)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum(-1, keepdim=True).sqrt()


def _coded(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [..., R] float32 -> codes int32 [..., R], scale float16 [..., 1]."""
    norm, middle = _norm(x), 2 ** (bits - 1)
    # Levels lie alike on both sides of 0: sizes are compared, with boundaries times the norm.
    size, passed_levels = x.abs(), torch.zeros_like(x, dtype=torch.int32)
    table = levels.sphere(x.shape[-1], bits)
    for boundary in (table[1:] + table[:-1])[middle:] / 2:
        passed_levels += size > float(np.float32(boundary)) * norm
    codes = torch.where(x > 0, middle + passed_levels, middle - 1 - passed_levels)
    return codes, half(norm)


def _values(codes: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """Values of codes [..., R], float32."""
    return _levels(codes.shape[-1], bits, codes.device)[codes.long()] * scale.float()


def encode(quantizer: Codebook, x: torch.Tensor, page: int) -> dict[str, torch.Tensor]:
    """x: [B, G, T, R], T a whole number of pages."""
    codes, scale = _coded(x.float(), quantizer.bits)
    return {"codes": packing.pack(codes, quantizer.bits), "scale": scale}


def decode(
    quantizer: Codebook, stored: dict[str, torch.Tensor], dims: int, page: int, dtype: torch.dtype
) -> torch.Tensor:
    """[B, G, T, R] in `dtype`."""
    codes = packing.unpack(stored["codes"], quantizer.bits, dims)
    return _values(codes, stored["scale"], quantizer.bits).to(dtype)
