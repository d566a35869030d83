"""Float16 numbers: a side of low rank whose dims are not quantised. Reads like full precision."""

from __future__ import annotations

import torch

from cuda_track.quantizers.affine import HALF_MAX
from cuda_track.quantizers.full import decode, mix, names, scores
from mlxkv.config import Half

__all__ = ["decode", "encode", "mix", "names", "scores"]


def encode(spec: Half, x: torch.Tensor, page: int) -> dict[str, torch.Tensor]:
    """x: [B, G, T, R] -> float16."""
    return {"values": x.clamp(-HALF_MAX, HALF_MAX).half()}
