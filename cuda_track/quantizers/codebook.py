"""Codebook codes (TurboQuant) by torch ops: x ~ norm * levels[code]. Spec: `reference_codebook`.

Stored per side, T a whole number of pages, n = R // 4:
    codes     int32   [B, G, T, W]
    scale     float16 [B, G, T, 1]
with a residual stage also
    signs     int32   [B, G, T, ceil(R/32)], one bit per projection
    length    float16 [B, G, T, 1]
with outlier channels
    codes     int32   [B, G, T, W], of the R - n other channels
    outliers  int32   [B, G, T, W'], codes of the n outlier channels
    scale     float16 [B, G, T, 2], of the outlier channels, of the others
    channels  int32   [B, G, pages, ceil(R/32)], one bit per channel
"""

from __future__ import annotations

from functools import cache
from math import pi, sqrt

import numpy as np
import torch

from cuda_track import packing, transform
from cuda_track.quantizers.affine import half
from mlxkv import levels, rotation
from mlxkv.formats_codebook import Codebook


def names(spec: Codebook) -> set[str]:
    """The tensors that a page is stored in."""
    extra = {"signs", "length"} if spec.residual else set()
    return {"codes", "scale"} | extra | ({"outliers", "channels"} if spec.outliers else set())


@cache
def _levels(dims: int, bits: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(levels.sphere(dims, bits).astype(np.float32), device=device)


@cache
def _projections(dims: int, seed: int, device: torch.device) -> torch.Tensor:
    """[R, R] of the residual stage, one projection a column."""
    return torch.tensor(rotation.gaussian((dims, dims), seed).astype(np.float32), device=device)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum(-1, keepdim=True).sqrt()


def _encode(x: torch.Tensor, bits: int, corrected: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [..., R] float32 -> codes int32 [..., R], scale float16 [..., 1]."""
    table, middle = levels.sphere(x.shape[-1], bits), 2 ** (bits - 1)
    norm = _norm(x)
    # By sizes, which are as many levels on either side of 0; boundaries go with the norm.
    size, above = x.abs(), torch.zeros_like(x, dtype=torch.int32)
    for boundary in (table[1:] + table[:-1])[middle:] / 2:
        above += size > float(np.float32(boundary)) * norm
    codes = torch.where(x > 0, middle + above, middle - 1 - above)
    if corrected:
        norm = norm / _norm(_levels(x.shape[-1], bits, x.device)[codes.long()])
    return codes, half(norm)


def _decode(words: torch.Tensor, scale: torch.Tensor, bits: int, dims: int) -> torch.Tensor:
    """[..., R] float32."""
    codes = packing.unpack(words, bits, dims)
    return _levels(dims, bits, words.device)[codes.long()] * scale.float()


def encode(spec: Codebook, x: torch.Tensor, page: int) -> dict[str, torch.Tensor]:
    """x: [B, G, T, R], T a whole number of pages."""
    x = x.float()
    if spec.outliers:
        return _encode_parts(spec, x, page)
    dims, bits = x.shape[-1], spec.level_bits
    codes, scale = _encode(x, bits, spec.corrected)
    stored = {"codes": packing.pack(codes, bits), "scale": scale}
    if not spec.residual:
        return stored
    rest = x - _levels(dims, bits, x.device)[codes.long()] * scale.float()
    signs = rest @ _projections(dims, spec.seed, x.device) > 0
    return {**stored, "signs": packing.pack(signs, 1), "length": half(_norm(rest))}


def _signs(stored: dict[str, torch.Tensor], dims: int) -> torch.Tensor:
    """[B, G, T, R] of +-sqrt(pi / 2) / R: times the length, what projections tell of the rest."""
    signs = packing.unpack(stored["signs"], 1, dims).float()
    return (2 * signs - 1) * (sqrt(pi / 2) / dims)


def decode(
    spec: Codebook, stored: dict[str, torch.Tensor], dims: int, page: int, dtype: torch.dtype
) -> torch.Tensor:
    """[B, G, T, R] in `dtype`."""
    if spec.outliers:
        return _decode_parts(spec, stored, dims, page).to(dtype)
    x = _decode(stored["codes"], stored["scale"], spec.level_bits, dims)
    if spec.residual:
        turned = _signs(stored, dims) @ _projections(dims, spec.seed, x.device).T
        x = x + turned * stored["length"].float()
    return x.to(dtype)


def scores(
    spec: Codebook, q: torch.Tensor, stored: dict[str, torch.Tensor], dims: int, page: int
) -> torch.Tensor:
    """q: [B, G, N, R] float32 -> q . x^ for every stored token: [B, G, N, T]."""
    return q @ decode(spec, stored, dims, page, q.dtype).mT


def mix(
    spec: Codebook, p: torch.Tensor, stored: dict[str, torch.Tensor], dims: int, page: int
) -> torch.Tensor:
    """p: [B, G, N, T] float32 -> sum_t p_t x^_t: [B, G, N, R]."""
    return p @ decode(spec, stored, dims, page, p.dtype)


# Outlier channels are chosen by page; each part has a rotation of its own, of seed 0.


def _encode_parts(spec: Codebook, x: torch.Tensor, page: int) -> dict[str, torch.Tensor]:
    *lead, tokens, dims = x.shape
    pages = x.reshape(*lead, tokens // page, page, dims)
    few = spec.parts(dims)[0][0]
    first = pages.square().sum(-2).sort(dim=-1, descending=True, stable=True).indices[..., :few]
    chosen = torch.zeros(pages[..., 0, :].shape, dtype=torch.int32, device=x.device)
    chosen.scatter_(-1, first, 1)
    ordered = pages.gather(-1, _order(chosen)[..., None, :].expand_as(pages))
    stored, scales, start = {}, [], 0
    for name, (n, bits) in zip(("outliers", "codes"), spec.parts(dims), strict=True):
        part = ordered[..., start : start + n].reshape(*lead, tokens, n)
        turned = transform.make("random", n, 0, x.device).store(part)
        codes, scale = _encode(turned, bits, spec.corrected)
        stored[name] = packing.pack(codes, bits)
        scales.append(scale)
        start += n
    return {**stored, "scale": torch.cat(scales, -1), "channels": packing.pack(chosen, 1)}


def _order(chosen: torch.Tensor) -> torch.Tensor:
    """[..., R] of 0 and 1 -> the channels, those that are 1 first, each kind in its order."""
    return (1 - chosen).sort(dim=-1, stable=True).indices


def _decode_parts(
    spec: Codebook, stored: dict[str, torch.Tensor], dims: int, page: int
) -> torch.Tensor:
    """[B, G, T, R] float32."""
    parts = []
    for i, (name, (n, bits)) in enumerate(
        zip(("outliers", "codes"), spec.parts(dims), strict=True)
    ):
        turned = _decode(stored[name], stored["scale"][..., i : i + 1], bits, n)
        parts.append(transform.make("random", n, 0, turned.device).restore(turned))
    x = torch.cat(parts, -1)
    *lead, tokens, _ = x.shape
    places = _order(packing.unpack(stored["channels"], 1, dims)).argsort(-1)
    pages = x.reshape(*lead, tokens // page, page, dims)
    return pages.gather(-1, places[..., None, :].expand_as(pages)).reshape(x.shape)
