"""Full precision: a side that is not compressed (`fp16/int4` keeps its keys like this)."""

from __future__ import annotations

import torch

from mlxkv.config import Full


def names(spec: Full) -> set[str]:
    """The tensors that a page is stored in."""
    return {"values"}


def encode(spec: Full, x: torch.Tensor, page: int) -> dict[str, torch.Tensor]:
    """x: [B, G, T, R], stored as it is."""
    return {"values": x}


def decode(
    spec: Full, stored: dict[str, torch.Tensor], dims: int, page: int, dtype: torch.dtype
) -> torch.Tensor:
    """[B, G, T, R] in `dtype`."""
    return stored["values"].to(dtype)


def scores(
    spec: Full, q: torch.Tensor, stored: dict[str, torch.Tensor], dims: int, page: int
) -> torch.Tensor:
    """q: [B, G, N, R] -> q . x for every stored token: [B, G, N, T]."""
    return q @ stored["values"].to(q.dtype).mT


def mix(
    spec: Full, p: torch.Tensor, stored: dict[str, torch.Tensor], dims: int, page: int
) -> torch.Tensor:
    """p: [B, G, N, T] -> sum_t p_t x_t: [B, G, N, R]."""
    return p @ stored["values"].to(p.dtype)
