"""Store keys or values by the spec, for every format that a preset names."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from mlxkv.formats.config import Affine, Codebook, Fill, Full, Half, Polar, PolarTree, Side
from mlxkv.spec import affine as ref
from mlxkv.spec import codebook, fill, polar
from mlxkv.spec import polar_tree as tree


def _polar(x: np.ndarray, spec: Polar) -> np.ndarray:
    return polar.decode(polar.encode(x, spec.radius, spec.angle), spec.angle)


def _fill(x: np.ndarray, spec: Fill) -> np.ndarray:
    return fill.decode(*fill.encode(x, spec.widths), spec.widths)


TILES = {Polar: _polar, Fill: _fill}  # [..., page, R] -> the same, decoded


def stored(x: np.ndarray, side: Side, sink: int, pages: int, page: int) -> np.ndarray:
    """Return x [B, G, T, D] as attention sees it: `mlxkv.spec.affine.stored` for every quantizer."""
    spec = side.quantizer
    if isinstance(spec, PolarTree):  # its spec and that of codebooks rotate by themselves
        assert side.transform in ("none", "random")
        turned = side.transform == "random"
        return tree.stored(x, sink, pages, page, spec.online, side.seed, turned)
    if isinstance(spec, Codebook):
        assert side.transform == "random"
        return codebook.stored(x, sink, pages, page, **asdict(spec), seed=side.seed)
    decoded = TILES.get(type(spec))
    if decoded is None and not isinstance(spec, Affine | Full | Half):
        raise TypeError(f"no law for {type(spec).__name__}")
    if decoded is None:
        turn = {"transform": side.transform, "seed": side.seed}
        return ref.stored(x, {"bits": 16, **asdict(spec), **turn}, sink, pages, page)
    out, dims = np.array(x, np.float64), x.shape[-1]
    if pages:
        inside = slice(sink, sink + pages * page)
        down = np.eye(dims) if side.transform == "none" else _down(side, dims)
        tiles = (out[:, :, inside] @ down).reshape(*x.shape[:2], pages, page, dims)
        out[:, :, inside] = decoded(tiles, side.quantizer).reshape(*x.shape[:2], -1, dims) @ down.T
    return out


def _down(side: Side, dims: int) -> np.ndarray:
    return ref.transform(side.transform, dims, side.seed)[0]
