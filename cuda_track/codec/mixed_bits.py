"""Mixed bits in torch ops: x ~ scale * (code - (2^b - 1) / 2), b by block of 16 stored dims. Spec:
`mlxkv.spec.mixed_bits`; stored: `MixedBits.tensors`."""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import pad

from cuda_track.codec import packing
from cuda_track.codec.affine import half, in_range
from mlxkv.formats.quantizers import DIMS, GAINS, STEPS, MixedBits


@cache
def tables(widths: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the distance of levels for variance 1, the gain and half of the largest code of every stored dim, [R]
    float32 each."""
    steps = [GAINS[bits] * STEPS[bits] for bits in widths]
    lists = steps, [GAINS[bits] for bits in widths], [(2**bits - 1) / 2 for bits in widths]
    return tuple(torch.tensor(x, device=device).repeat_interleave(DIMS) for x in lists)


def encode(quantizer: MixedBits, x: torch.Tensor, page: int) -> dict[str, torch.Tensor]:
    """x: [B, G, T, R], T a whole number of pages."""
    steps, gains, middle = tables(quantizer.widths, x.device)
    x = x.float()
    scale = half((x * steps).square().mean(-1, keepdim=True).sqrt())
    step = scale.float()
    codes = (x * gains / step.where(step > 0, 1.0) + middle).round()
    codes = codes.clamp(min=0.0).minimum(2 * middle).int()
    return {"codes": pack(quantizer, codes), "scale": scale}


def pack(quantizer: MixedBits, codes: torch.Tensor) -> torch.Tensor:
    """codes: [..., R] int32 -> [..., W] int32, one stream of bits a token."""
    parts, start = [], 0
    for bits, count in quantizer.runs:
        words = packing.pack(codes[..., start : start + count], bits)
        parts.append(words.contiguous().view(torch.int16)[..., : count * bits // 16])
        start += count
    halves = torch.cat(parts, -1)
    halves = pad(halves, (0, halves.shape[-1] % 2))
    return halves.contiguous().view(torch.int32)


def join(
    quantizer: MixedBits, codes: torch.Tensor, numbers: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Pack codes [B, G, T, R], one for each stored dim, beside their scales."""
    return {"codes": pack(quantizer, codes), **numbers}


def unpack(quantizer: MixedBits, words: torch.Tensor) -> torch.Tensor:
    """Invert `pack`."""
    halves, parts, start = words.contiguous().view(torch.int16), [], 0
    for bits, count in quantizer.runs:
        size = count * bits // 16
        part = pad(halves[..., start : start + size], (0, size % 2))
        parts.append(packing.unpack(part.contiguous().view(torch.int32), bits, count))
        start += size
    return torch.cat(parts, -1)


def decode(
    quantizer: MixedBits, stored: dict[str, torch.Tensor], dims: int, page: int, dtype: torch.dtype
) -> torch.Tensor:
    """[B, G, T, R] in `dtype`."""
    codes = unpack(quantizer, stored["codes"])
    middle = tables(quantizer.widths, codes.device)[2]
    return in_range((codes - middle) * stored["scale"].float(), dtype)
