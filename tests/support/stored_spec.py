"""Store keys or values by the spec, for every format that a preset names."""

from importlib import import_module

import numpy as np

from mlxkv.formats.config import Side
from mlxkv.formats.quantizers import (
    Affine,
    Codebook,
    Full,
    Half,
    MixedBits,
    Polar,
    PolarTree,
    Quantizer,
)
from mlxkv.spec import affine as ref
from mlxkv.spec import codebook, mixed_bits, polar
from mlxkv.spec import polar_tree as tree


def _affine(x: np.ndarray, spec: Affine) -> np.ndarray:
    if spec.shared:
        codes, scale = ref.tensor_encode(x, spec.bits)
        return scale * (codes.astype(np.float64) - 2 ** (spec.bits - 1))
    group = ref.group_size(spec.group, x.shape[-1 if spec.axis == "token" else -2])
    codes = ref.affine_encode(x, spec.bits, group, spec.symmetric, spec.axis, spec.clip)
    return ref.affine_decode(*codes, group, spec.axis)


def _codebook(x: np.ndarray, spec: Codebook) -> np.ndarray:
    levels = codebook.sphere_levels(x.shape[-1], spec.bits)
    return codebook.codebook_decode(*codebook.codebook_encode(x, levels), levels)


def _tree(x: np.ndarray, spec: PolarTree) -> np.ndarray:
    """online: 8 steps of k-means for each head, codebooks rounded to float16."""
    out, books = [], [tree.angle_codebook(level) for level in range(1, tree.LEVELS + 1)]
    for head in x:
        fitted, sizes = books, head
        if spec.online:
            fitted = []
            for angle, book in zip(tree.to_polar(head)[1], books, strict=True):
                sizes = np.hypot(sizes[..., ::2], sizes[..., 1::2])
                fitted.append(ref._half(tree.fit_codebook(angle, sizes > 0, book, 8)))
        out.append(tree.tree_decode(*tree.tree_encode(head, fitted), fitted))
    return np.stack(out)


def _polar(x: np.ndarray, spec: Polar) -> np.ndarray:
    return polar.decode(polar.encode(x, spec.radius, spec.angle), spec.angle)


def _fill(x: np.ndarray, spec: MixedBits) -> np.ndarray:
    return mixed_bits.decode(*mixed_bits.encode(x, spec.widths), spec.widths)


def _by_spec(x: np.ndarray, spec: Quantizer) -> np.ndarray:
    module = import_module(f"mlxkv.spec.{spec.file or spec.method}")
    return module.decode(module.encode(x, spec), spec)


# A page of all heads, [G, page, R] -> the same, decoded.
LAWS = {  # of the others: `encode` and `decode` of the spec
    Affine: _affine,
    Codebook: _codebook,
    PolarTree: _tree,
    Polar: _polar,
    MixedBits: _fill,
}


def _transform(side: Side, dims: int) -> tuple[np.ndarray, np.ndarray]:
    if side.transform == "random":
        down = codebook.random_rotation(dims, side.seed)
        return down, down.T
    return ref.transform(side.transform, dims, side.seed)


def stored(x: np.ndarray, side: Side, sink: int, pages: int, page: int) -> np.ndarray:
    """Return x [B, G, T, D] as attention sees it: pages transformed, encoded and decoded, windows exact."""
    out = np.array(x, np.float64)
    if isinstance(side.quantizer, Full | Half):
        return out
    (down, up), law = _transform(side, x.shape[-1]), LAWS.get(type(side.quantizer), _by_spec)
    for b, n in np.ndindex(len(x), pages):
        inside = slice(sink + n * page, sink + (n + 1) * page)
        out[b, :, inside] = law(out[b, :, inside] @ down, side.quantizer) @ up
    return out
