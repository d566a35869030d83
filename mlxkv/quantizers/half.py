"""Float16 numbers: a side of low rank whose dims are not quantised. Reads like full precision."""

from __future__ import annotations

import mlx.core as mx

from mlxkv.config import Half
from mlxkv.quantizers.affine import HALF_MAX
from mlxkv.quantizers.full import decode, mix, names, scores

__all__ = ["decode", "encode", "mix", "names", "scores"]


def encode(spec: Half, x: mx.array, page: int) -> dict[str, mx.array]:
    """x: [B, G, T, R] -> float16."""
    return {"values": mx.clip(x, -HALF_MAX, HALF_MAX).astype(mx.float16)}
