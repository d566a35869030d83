"""Full precision: a side that is not compressed (`fp16/int4` keeps its keys like this)."""

from __future__ import annotations

import mlx.core as mx

from mlxkv.config import Full


def names(spec: Full) -> set[str]:
    """The arrays that a page is stored in."""
    return {"values"}


def encode(spec: Full, x: mx.array, page: int) -> dict[str, mx.array]:
    """x: [B, G, T, R], stored as it is."""
    return {"values": x}


def decode(
    spec: Full, stored: dict[str, mx.array], dims: int, page: int, dtype: mx.Dtype
) -> mx.array:
    """[B, G, T, R] in `dtype`."""
    return stored["values"].astype(dtype)


def scores(spec: Full, q: mx.array, stored: dict[str, mx.array], dims: int, page: int) -> mx.array:
    """q: [B, G, N, R] -> q . x for every stored token: [B, G, N, T]."""
    return q @ stored["values"].astype(q.dtype).swapaxes(-1, -2)


def mix(spec: Full, p: mx.array, stored: dict[str, mx.array], dims: int, page: int) -> mx.array:
    """p: [B, G, N, T] -> sum_t p_t x_t: [B, G, N, R]."""
    return p @ stored["values"].astype(p.dtype)
