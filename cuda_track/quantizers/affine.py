"""Affine codes by torch ops: x ~ scale * code + bias. Spec: `reference.affine_encode`.

Stored per side, T a whole number of pages:
    codes  int32   [B, G, T, W]
    scale  float16 [B, G, T, ceil(R/g)] (axis token) or [B, G, T/g, R] (axis channel)
    bias   float16, as scale; absent when symmetric
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from cuda_track import packing
from mlxkv.config import Affine

HALF_MAX = 65504.0


def _grouped(x: torch.Tensor, group: int, axis: str) -> torch.Tensor:
    """[..., T, R] -> [..., T, ceil(R/g), g] (token; a short last group repeats its last value) or
    [..., T/g, R, g] (channel)."""
    *lead, tokens, dims = x.shape
    if axis == "token":
        if short := -dims % group:
            x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], short)], -1)
        return x.reshape(*lead, tokens, -1, group)
    return x.reshape(*lead, tokens // group, group, dims).mT


def _ungrouped(x: torch.Tensor, axis: str, dims: int) -> torch.Tensor:
    if axis == "channel":
        x = x.mT
        return x.reshape(*x.shape[:-3], -1, x.shape[-1])
    return x.reshape(*x.shape[:-2], -1)[..., :dims]


def half(x: torch.Tensor, limit: float = HALF_MAX) -> torch.Tensor:
    return x.clamp(-limit, limit).half()


def names(spec: Affine) -> set[str]:
    """The tensors that a page is stored in."""
    return {"codes", "scale"} if spec.symmetric else {"codes", "scale", "bias"}


def clip_rows(x: torch.Tensor, rank: int) -> torch.Tensor:
    """x: [..., R], each row kept within its rank-th largest absolute value (`Affine.clip_rank`; 1:
    as it comes). Spec: `reference.clip_rows`."""
    if rank == 1:
        return x
    limit = x.abs().topk(rank, -1).values[..., -1:]
    return x.clamp(-limit, limit)


def encode(spec: Affine, x: torch.Tensor, page: int) -> dict[str, torch.Tensor]:
    """x: [B, G, T, R], T a whole number of pages."""
    group = spec.group_size(x.shape[-1], page)
    clipped = clip_rows(x.float(), spec.clip_rank(x.shape[-1]))
    g = _grouped(clipped, group, spec.axis)
    top, middle = 2**spec.bits - 1, 2 ** (spec.bits - 1)
    if spec.symmetric:
        scale = half(g.abs().amax(-1) / (middle - 1), HALF_MAX / middle)
        bias, low = scale.float() * -middle, 1
    else:
        stored_bias = half(g.amin(-1))
        bias, low = stored_bias.float(), 0
        scale = half((g.amax(-1) - bias) / top)
    step = scale.float()
    codes = (g - bias[..., None]) / torch.where(step > 0, step, 1.0)[..., None]
    codes = codes.round().clamp(low, top)
    if spec.symmetric:  # a group of zeros: its code is the middle one
        codes = torch.where(step[..., None] > 0, codes, middle)
    words = packing.pack(_ungrouped(codes, spec.axis, x.shape[-1]), spec.bits)
    stored = {"codes": words, "scale": scale}
    return stored if spec.symmetric else {**stored, "bias": stored_bias}


def bias_of(spec: Affine, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """The bias of every group; a symmetric one is exact in float16: a power of two times the
    scale."""
    return stored["scale"] * -(2 ** (spec.bits - 1)) if spec.symmetric else stored["bias"]


def decode(
    spec: Affine, stored: dict[str, torch.Tensor], dims: int, page: int, dtype: torch.dtype
) -> torch.Tensor:
    """[B, G, T, R] in `dtype`."""
    group = spec.group_size(dims, page)
    codes = packing.unpack(stored["codes"], spec.bits, dims).float()
    if spec.axis == "token" and dims % group:
        codes = pad(codes, (0, -dims % group))
    g = _grouped(codes, group, spec.axis)
    scale, bias = stored["scale"].float(), bias_of(spec, stored).float()
    return _ungrouped(g * scale[..., None] + bias[..., None], spec.axis, dims).to(dtype)


def scores(
    spec: Affine, q: torch.Tensor, stored: dict[str, torch.Tensor], dims: int, page: int
) -> torch.Tensor:
    """q: [B, G, N, R] float32 -> q . x^ for every stored token: [B, G, N, T]."""
    return q @ decode(spec, stored, dims, page, q.dtype).mT


def mix(
    spec: Affine, p: torch.Tensor, stored: dict[str, torch.Tensor], dims: int, page: int
) -> torch.Tensor:
    """p: [B, G, N, T] float32 -> sum_t p_t x^_t: [B, G, N, R]."""
    return p @ decode(spec, stored, dims, page, p.dtype)
