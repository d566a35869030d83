"""Kitty by torch ops: min-max codes per channel of a page, wider for the largest channels. Spec:
`mlxkv.spec.mixed.kitty`; stored: `Kitty.tensors`."""

from __future__ import annotations

import torch

from cuda_track.codec import packing
from cuda_track.codec.affine import half, in_range
from mlxkv.formats.tile import Kitty


def encode(spec: Kitty, x: torch.Tensor, page: int) -> dict[str, torch.Tensor]:
    """x: [B, G, T, R], T a whole number of pages."""
    pages, dims = x.float().unflatten(2, (-1, page)), x.shape[-1]
    order = pages.abs().mean(-2).argsort(dim=-1, descending=True, stable=True)
    at = order[..., : spec.count(dims)].sort(-1).values
    chosen = torch.zeros_like(order, dtype=torch.int32).scatter(-1, at, 1)
    top = torch.where(chosen > 0, float(spec.most), float(spec.least))
    bias = half(pages.amin(-2))
    scale = half((pages.amax(-2) - bias.float()) / top)
    step = scale.float()[..., None, :]
    codes = ((pages - bias.float()[..., None, :]) / step.where(step > 0, 1.0)).round()
    codes = codes.clamp(min=0.0).minimum(top[..., None, :]).int()
    high = torch.where(chosen[..., None, :] > 0, codes >> spec.bits, codes)
    low = codes.take_along_dim(at[..., None, :], -1) & spec.least
    return {
        "codes": packing.pack(high.flatten(2, 3), spec.bits),
        "more": packing.pack(low.flatten(2, 3), spec.bits),
        "channels": packing.pack(chosen, 1),
        "scale": scale,
        "bias": bias,
    }


def decode(
    spec: Kitty, stored: dict[str, torch.Tensor], dims: int, page: int, dtype: torch.dtype
) -> torch.Tensor:
    """[B, G, T, R] in `dtype`."""
    high = packing.unpack(stored["codes"], spec.bits, dims).int().unflatten(2, (-1, page))
    low = packing.unpack(stored["more"], spec.bits, spec.count(dims)).int()
    chosen = packing.unpack(stored["channels"], 1, dims).int()[..., None, :]
    place = (chosen.cumsum(-1) - 1).clamp(min=0)
    low = low.unflatten(2, (-1, page)).take_along_dim(place, -1)
    codes = torch.where(chosen > 0, (high << spec.bits) + low, high)
    scale, bias = (stored[name].float()[..., None, :] for name in ("scale", "bias"))
    return in_range((codes * scale + bias).flatten(2, 3), dtype)
