"""Golden tensors of codebook codes and polar trees."""

import numpy as np

from golden.affine import SEED
from mlxkv.spec import affine as ref
from mlxkv.spec import codebook as codebook_ref
from mlxkv.spec import polar_tree as tree_ref

DIMS, TOKENS = (64, 80, 128), 16
STEPS = 8  # of k-means, as in `mlxkv.codec.polar_tree`
# A float32 backend may choose the other of two levels for a coordinate of the unit vector, or an
# angle, that lies as close to their boundary.
MARGIN = 3e-6


def inputs(rng: np.random.Generator, tokens: int, dims: int) -> np.ndarray:
    """[1, 1, T, D] with two large channels; the first token is zeros."""
    x = rng.standard_normal((1, 1, tokens, dims))
    x[..., 3] *= 8
    x[..., dims // 2] += 6
    x[0, 0, 0] = 0.0
    return x.astype(np.float16).astype(np.float64)


def near(values: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return the packed mask of values close to a boundary; zeros lie on one exactly and do not count."""
    boundaries = (levels[1:] + levels[:-1]) / 2
    gap = np.abs(values[..., None] - boundaries).min(-1)
    return np.packbits((gap < MARGIN) & (values != 0))


def codebook(rng) -> dict:
    """Levels, rotations, codes of rotated vectors, attention to codes of 2 bits."""
    out = {}
    for dims in DIMS:
        x = inputs(rng, TOKENS, dims)
        rotation = codebook_ref.random_rotation(dims)
        y = x @ rotation
        out[f"{dims}.x"] = x.astype(np.float16)
        out[f"{dims}.rotation"] = rotation[:3].astype(np.float32)
        norm = np.sqrt((y * y).sum(-1, keepdims=True))
        unit = y / np.where(norm > 0, norm, 1)
        for bits in (1, 2, 3, 4):
            key, levels = f"{dims}.{bits}", codebook_ref.sphere_levels(dims, bits)
            codes, scale = codebook_ref.codebook_encode(y, levels)
            out[f"{key}.levels"] = levels.astype(np.float32)
            out[f"{key}.codes"], out[f"{key}.near"] = codes, near(unit, levels)
            out[f"{key}.scale"] = scale.astype(np.float16)
            # Norms over those of decoded vectors, which nothing stores; the set stays as it was written.
            decoded = np.sqrt((levels[codes] ** 2).sum(-1, keepdims=True))
            out[f"{key}.corrected"] = ref.half(norm / decoded).astype(np.float16)
        levels = codebook_ref.sphere_levels(dims, 2)
        decoded = codebook_ref.codebook_decode(*codebook_ref.codebook_encode(y, levels), levels)
        q = rng.standard_normal((1, 2, 1, dims)).astype(np.float16).astype(np.float64)
        out[f"{dims}.q"] = q.astype(np.float16)
        values = decoded @ rotation.T
        out[f"{dims}.out"] = ref.attention(q, values, values, dims**-0.5).astype(np.float32)
    return out


def polar_tree(rng) -> dict:
    """Codebooks, codes and radii of rotated vectors; codebooks fitted to a page."""
    books = [tree_ref.angle_codebook(level) for level in range(1, tree_ref.LEVELS + 1)]
    out = {f"book.{i}": book.astype(np.float32) for i, book in enumerate(books, 1)}
    for dims in DIMS:
        x = inputs(rng, TOKENS, dims)
        rotation = codebook_ref.random_rotation(dims)
        y = x @ rotation
        codes, radii = tree_ref.tree_encode(y, books)
        _, angles = tree_ref.to_polar(y)
        out[f"{dims}.x"], out[f"{dims}.radii"] = x.astype(np.float16), radii.astype(np.float16)
        for i, (code, angle, book) in enumerate(zip(codes, angles, books, strict=True), 1):
            out[f"{dims}.codes.{i}"], out[f"{dims}.near.{i}"] = code, near(angle, book)
        decoded = tree_ref.tree_decode(codes, radii, books)
        out[f"{dims}.decoded"] = decoded[:, :, ::4].astype(np.float32)
        q = rng.standard_normal((1, 2, 1, dims)).astype(np.float16).astype(np.float64)
        out[f"{dims}.q"] = q.astype(np.float16)
        attended = ref.attention(q, decoded @ rotation.T, decoded @ rotation.T, dims**-0.5)
        out[f"{dims}.out"] = attended.astype(np.float32)
    page = inputs(rng, 64, 64)  # online: fitted to a page that is far from Gaussian
    out["online.x"] = page.astype(np.float16)
    radii, angles = page, tree_ref.to_polar(page)[1]
    for i, (angle, book) in enumerate(zip(angles, books, strict=True), 1):
        radii = np.hypot(radii[..., ::2], radii[..., 1::2])
        fitted = tree_ref.fit_codebook(angle, radii > 0, book, STEPS)
        out[f"online.book.{i}"] = fitted.astype(np.float32)
    return out


TABLES = {  # name: seed, maker, what the header says beside version and seed
    "codebook": (SEED + 20, codebook, {}),
    "polar_tree": (SEED + 21, polar_tree, {}),
}
