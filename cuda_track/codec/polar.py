"""PolarQuant (Wu et al.) by torch ops: pairs of dims as radius and angle. Spec: `mlxkv.spec.polar`; stored:
`Polar.tensors`."""

from __future__ import annotations

from math import tau

import torch

from cuda_track.codec import packing
from cuda_track.codec.affine import half, in_range
from mlxkv.formats.quantizers import Polar


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.chunk(2, -1)


def encode(quantizer: Polar, x: torch.Tensor, page: int) -> dict[str, torch.Tensor]:
    """x: [B, G, T, R], T a whole number of pages."""
    a, b = _halves(x.float().unflatten(2, (-1, page)))
    angle = torch.atan2(b, a)
    parts = {"radius": torch.hypot(a, b), "angle": angle.where(angle >= 0, angle + tau)}
    codes, stored = [], {}
    for name, part in parts.items():
        bits = getattr(quantizer, name)
        low = half(part.amin(-2, keepdim=True))
        width = (part.amax(-2, keepdim=True) - low.float()).clamp(min=0.0)
        step = half(width / 2**bits)
        size = step.float()
        code = ((part - low.float()) / size.where(size > 0, 1.0)).floor().clamp(0, 2**bits - 1)
        codes.append(code.int().flatten(2, 3))
        stored |= {f"{name}_step": step.flatten(2, 3), f"{name}_low": low.flatten(2, 3)}
    return join(quantizer, torch.cat(codes, -1), stored)


def decode(
    quantizer: Polar, stored: dict[str, torch.Tensor], dims: int, page: int, dtype: torch.dtype
) -> torch.Tensor:
    """[B, G, T, R] in `dtype`."""
    levels = split(quantizer, stored["codes"], dims).float().unflatten(2, (-1, page))
    radius, angle = (
        stored[f"{name}_low"].float().unsqueeze(3)
        + (codes + 0.5) * stored[f"{name}_step"].float().unsqueeze(3)
        for name, codes in zip(("radius", "angle"), _halves(levels), strict=True)
    )
    return in_range(
        torch.cat([radius * angle.cos(), radius * angle.sin()], -1).flatten(2, 3), dtype
    )


def split(quantizer: Polar, words: torch.Tensor, dims: int) -> torch.Tensor:
    """Split packed codes of pairs [..., W] into those of all radii, then of all angles: [..., R]."""
    codes = packing.unpack(words, quantizer.pair_bits, dims // 2)
    return torch.cat([codes >> quantizer.angle, codes & (2**quantizer.angle - 1)], -1)


def join(
    quantizer: Polar, codes: torch.Tensor, numbers: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Pack codes [B, G, T, R], of all radii and then of all angles, beside their ranges."""
    radii, angles = _halves(codes)
    return {
        "codes": packing.pack((radii << quantizer.angle) + angles, quantizer.pair_bits),
        **numbers,
    }
