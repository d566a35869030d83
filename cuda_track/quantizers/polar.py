"""PolarQuant (Wu et al.) by torch ops: pairs of dims as radius and angle. Spec: `reference_polar`.

Stored per side, T a whole number P of pages:
    codes                                          int32   [B, G, T, W], R/2 codes of a token
    radius_step, radius_low, angle_step, angle_low float16 [B, G, P, R/2]
"""

from __future__ import annotations

from math import tau

import torch

from cuda_track import packing
from cuda_track.quantizers.affine import HALF_MAX, half
from cuda_track.quantizers.dual_scale import _rows, _tiles
from mlxkv.config import Polar

NUMBERS = ("radius_step", "radius_low", "angle_step", "angle_low")


def names(spec: Polar) -> set[str]:
    """The tensors that a page is stored in."""
    return {"codes", *NUMBERS}


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.chunk(2, -1)


def _steps(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[..., page, n] -> codes, step, low."""
    low = half(x.amin(-2, keepdim=True))
    start = low.float()
    step = half((x.amax(-2, keepdim=True) - start).clamp(min=0.0) / 2**bits)
    size = step.float()
    codes = ((x - start) / torch.where(size > 0, size, 1.0)).floor()
    return codes.clamp(0, 2**bits - 1).int(), step, low


def encode(spec: Polar, x: torch.Tensor, page: int) -> dict[str, torch.Tensor]:
    """x: [B, G, T, R], T a whole number of pages."""
    a, b = _halves(_tiles(x.float(), page))
    angle = torch.atan2(b, a)
    angle = torch.where(angle < 0, angle + tau, angle)
    rho, *radii = _steps(torch.hypot(a, b), spec.radius)
    phi, *angles = _steps(angle, spec.angle)
    codes = _rows((rho << spec.angle) + phi)
    numbers = zip(NUMBERS, map(_rows, (*radii, *angles)), strict=True)
    return {"codes": packing.pack(codes, spec.pair_bits), **dict(numbers)}


def _middle(stored: dict[str, torch.Tensor], name: str, codes: torch.Tensor) -> torch.Tensor:
    """What codes [B, G, P, page, R/2] of the radius or of the angle stand for."""
    step, low = (stored[f"{name}_{part}"][:, :, :, None].float() for part in ("step", "low"))
    return low + (codes.float() + 0.5) * step


def decode(
    spec: Polar, stored: dict[str, torch.Tensor], dims: int, page: int, dtype: torch.dtype
) -> torch.Tensor:
    """[B, G, T, R] in `dtype`."""
    codes = _tiles(packing.unpack(stored["codes"], spec.pair_bits, dims // 2), page)
    radius = _middle(stored, "radius", codes >> spec.angle)
    angle = _middle(stored, "angle", codes & (2**spec.angle - 1))
    x = _rows(torch.cat([radius * angle.cos(), radius * angle.sin()], -1))
    if dtype == torch.float16:  # the middle of a step may lie beyond
        x = x.clamp(-HALF_MAX, HALF_MAX)
    return x.to(dtype)


def scores(
    spec: Polar, q: torch.Tensor, stored: dict[str, torch.Tensor], dims: int, page: int
) -> torch.Tensor:
    """q: [B, G, N, R] float32 -> q . x^ for every stored token: [B, G, N, T]."""
    return q @ decode(spec, stored, dims, page, q.dtype).mT


def split(spec: Polar, words: torch.Tensor, dims: int) -> torch.Tensor:
    """Packed codes of pairs [..., W] -> [..., R]: those of all radii, then those of all angles."""
    codes = packing.unpack(words, spec.pair_bits, dims // 2)
    return torch.cat([codes >> spec.angle, codes & (2**spec.angle - 1)], -1)


def join(spec: Polar, codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `split`."""
    radii, angles = _halves(codes)
    return packing.pack((radii << spec.angle) + angles, spec.pair_bits)


def mix(
    spec: Polar, p: torch.Tensor, stored: dict[str, torch.Tensor], dims: int, page: int
) -> torch.Tensor:
    """p: [B, G, N, T] float32 -> sum_t p_t x^_t: [B, G, N, R]."""
    return p @ decode(spec, stored, dims, page, p.dtype)
