"""Affine codes by torch ops: x ~ scale * code + bias. Spec: `mlxkv.spec.affine`; stored: `Affine.tensors`."""

from __future__ import annotations

import torch

from cuda_track.codec import packing
from mlxkv.formats.quantizers import HALF_MAX, Affine


def half(x: torch.Tensor, limit: float = HALF_MAX) -> torch.Tensor:
    return x.clamp(-limit, limit).half()


def in_range(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`: decoded values may lie a little beyond the largest float16."""
    return half(x) if dtype == torch.float16 else x.to(dtype)


def clip_rows(x: torch.Tensor, rank: int) -> torch.Tensor:
    """Clip each row of x [..., R] to its rank-th largest absolute value (`Affine.clip_rank`)."""
    if rank == 1:
        return x
    limit = x.abs().topk(rank, -1).values[..., -1:]
    return x.clamp(-limit, limit)


def _grouped(x: torch.Tensor, quantizer: Affine, page: int) -> torch.Tensor:
    """[..., T, R] -> [..., T, ceil(R/g), g] (axis token; a short last group repeats its last value) or
    [..., T/g, R, g] (axis channel)."""
    dims = x.shape[-1]
    group = quantizer.group_size(dims, page)
    if quantizer.axis == "channel":
        return x.unflatten(-2, (-1, group)).mT
    if short := -dims % group:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], short)], -1)
    return x.unflatten(-1, (-1, group))


def _ungrouped(x: torch.Tensor, quantizer: Affine, dims: int) -> torch.Tensor:
    return x.mT.flatten(-3, -2) if quantizer.axis == "channel" else x.flatten(-2)[..., :dims]


def encode(quantizer: Affine, x: torch.Tensor, page: int) -> dict[str, torch.Tensor]:
    """x: [B, G, T, R], T a whole number of pages."""
    dims = x.shape[-1]
    g = _grouped(clip_rows(x.float(), quantizer.clip_rank(dims)), quantizer, page)
    if quantizer.symmetric:
        stored, codes = _symmetric(quantizer, g, page)
    else:
        stored, codes = _min_max(quantizer, g)
    return {"codes": packing.pack(_ungrouped(codes, quantizer, dims), quantizer.bits), **stored}


def _min_max(quantizer: Affine, g: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    top, bias = 2**quantizer.bits - 1, half(g.amin(-1))
    scale = half((g.amax(-1) - bias.float()) / top)
    step = scale.float()[..., None]
    codes = ((g - bias.float()[..., None]) / step.where(step > 0, 1.0)).round().clamp(0, top)
    return {"scale": scale, "bias": bias}, codes


def _symmetric(
    quantizer: Affine, g: torch.Tensor, page: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    middle, largest = 2 ** (quantizer.bits - 1), g.abs().amax(-1)
    if quantizer.shared:  # by all kv heads and tokens of a page: [B, G, T, 1]
        pages = largest.unflatten(2, (-1, page))
        largest = pages.amax((1, 3), keepdim=True).expand_as(pages).flatten(2, 3)
    scale = half(largest / (middle - 1), HALF_MAX / middle)
    step = scale.float()[..., None]
    codes = ((g + middle * step) / step.where(step > 0, 1.0)).round().clamp(1, 2 * middle - 1)
    return {"scale": scale}, codes.where(step > 0, middle)  # a group of zeros: the middle code


def bias_of(quantizer: Affine, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the bias of every group; a symmetric one, a power of two times the scale, is exact in float16."""
    return stored["scale"] * -(2 ** (quantizer.bits - 1)) if quantizer.symmetric else stored["bias"]


def decode(
    quantizer: Affine, stored: dict[str, torch.Tensor], dims: int, page: int, dtype: torch.dtype
) -> torch.Tensor:
    """[B, G, T, R] in `dtype`."""
    codes = packing.unpack(stored["codes"], quantizer.bits, dims).float()
    scale, bias = (x.float()[..., None] for x in (stored["scale"], bias_of(quantizer, stored)))
    return _ungrouped(_grouped(codes, quantizer, page) * scale + bias, quantizer, dims).to(dtype)
