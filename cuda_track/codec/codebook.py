"""Codebook codes (TurboQuant) by torch ops: x ~ norm * levels[code]. Spec: `mlxkv.spec.codebook`; stored:
`Codebook.tensors`."""

from __future__ import annotations

from functools import cache
from math import pi, sqrt

import numpy as np
import torch

from cuda_track.codec import packing, transform
from cuda_track.codec.affine import half
from mlxkv.formats import levels, matrices
from mlxkv.formats.codebook import Codebook


@cache
def _levels(dims: int, bits: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(levels.sphere(dims, bits).astype(np.float32), device=device)


@cache
def _projections(dims: int, seed: int, device: torch.device) -> torch.Tensor:
    """[R, R] of the residual stage, one projection a column."""
    return torch.tensor(matrices.gaussian((dims, dims), seed).astype(np.float32), device=device)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum(-1, keepdim=True).sqrt()


def _coded(x: torch.Tensor, bits: int, corrected: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [..., R] float32 -> codes int32 [..., R], scale float16 [..., 1]."""
    norm, middle = _norm(x), 2 ** (bits - 1)
    # Levels lie alike on both sides of 0: sizes are compared, with boundaries times the norm.
    size, above = x.abs(), torch.zeros_like(x, dtype=torch.int32)
    table = levels.sphere(x.shape[-1], bits)
    for boundary in (table[1:] + table[:-1])[middle:] / 2:
        above += size > float(np.float32(boundary)) * norm
    codes = torch.where(x > 0, middle + above, middle - 1 - above)
    if corrected:
        norm = norm / _norm(_levels(x.shape[-1], bits, x.device)[codes.long()])
    return codes, half(norm)


def _values(codes: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """Values of codes [..., R], float32."""
    return _levels(codes.shape[-1], bits, codes.device)[codes.long()] * scale.float()


def encode(spec: Codebook, x: torch.Tensor, page: int) -> dict[str, torch.Tensor]:
    """x: [B, G, T, R], T a whole number of pages."""
    if spec.outliers:
        return _encode_parts(spec, x.float(), page)
    x, bits = x.float(), spec.level_bits
    codes, scale = _coded(x, bits, spec.corrected)
    stored = {"codes": packing.pack(codes, bits), "scale": scale}
    if spec.residual:
        rest = x - _values(codes, scale, bits)
        signs = rest @ _projections(x.shape[-1], spec.seed, x.device) > 0
        stored |= {"signs": packing.pack(signs, 1), "length": half(_norm(rest))}
    return stored


def decode(
    spec: Codebook, stored: dict[str, torch.Tensor], dims: int, page: int, dtype: torch.dtype
) -> torch.Tensor:
    """[B, G, T, R] in `dtype`."""
    if spec.outliers:
        return _decode_parts(spec, stored, dims, page).to(dtype)
    codes = packing.unpack(stored["codes"], spec.level_bits, dims)
    x = _values(codes, stored["scale"], spec.level_bits)
    if spec.residual:
        signs = 2.0 * packing.unpack(stored["signs"], 1, dims) - 1
        turned = signs @ _projections(dims, spec.seed, x.device).T
        x = x + turned * (stored["length"].float() * (sqrt(pi / 2) / dims))
    return x.to(dtype)


# Outlier channels are chosen by page; each part has a rotation of its own, of seed 0.


def _encode_parts(spec: Codebook, x: torch.Tensor, page: int) -> dict[str, torch.Tensor]:
    pages, sizes = x.unflatten(2, (-1, page)), [n for n, _ in spec.parts(x.shape[-1])]
    energy = pages.square().sum(-2)
    first = energy.sort(dim=-1, descending=True, stable=True).indices[..., : sizes[0]]
    chosen = torch.zeros_like(energy, dtype=torch.int32).scatter_(-1, first, 1)
    ordered = pages.take_along_dim(_order(chosen)[..., None, :], -1).flatten(2, 3)
    stored, scales = {"channels": packing.pack(chosen, 1)}, []
    for name, part, (n, bits) in _parts(spec, x.shape[-1], ordered.split(sizes, -1)):
        codes, scale = _coded(_rotation(n, x).store(part), bits, spec.corrected)
        stored[name] = packing.pack(codes, bits)
        scales.append(scale)
    return stored | {"scale": torch.cat(scales, -1)}


def _decode_parts(
    spec: Codebook, stored: dict[str, torch.Tensor], dims: int, page: int
) -> torch.Tensor:
    """[B, G, T, R] float32."""
    values = []
    for name, scale, (n, bits) in _parts(spec, dims, stored["scale"].split(1, -1)):
        turned = _values(packing.unpack(stored[name], bits, n), scale, bits)
        values.append(_rotation(n, turned).restore(turned))
    pages = torch.cat(values, -1).unflatten(2, (-1, page))
    places = _order(packing.unpack(stored["channels"], 1, dims)).argsort(-1)
    return pages.take_along_dim(places[..., None, :], -1).flatten(2, 3)


def _parts(spec: Codebook, dims: int, tensors):
    """(name of the codes, tensor, (dims, bits)) of the outlier channels and of the others."""
    return zip(("outliers", "codes"), tensors, spec.parts(dims), strict=True)


def _rotation(dims: int, like: torch.Tensor) -> transform.Transform:
    return transform.make("random", dims, 0, like.device)


def _order(chosen: torch.Tensor) -> torch.Tensor:
    """Channels [..., R], those that are 1 in `chosen` first, each kind in its order."""
    return (1 - chosen).sort(dim=-1, stable=True).indices
