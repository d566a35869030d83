"""Polar trees (PolarQuant of Han et al.) by plain MLX ops. Spec: `spec.polar_tree`.
Stored: `PolarTree.tensors`."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import mlx.core as mx
import numpy as np

from mlxkv.codec import packing
from mlxkv.codec.affine import half
from mlxkv.formats import levels
from mlxkv.formats.layout import TREE_BITS
from mlxkv.formats.quantizers import TREE_RECORD, TREE_SIZES, TREE_STEPS, PolarTree

Books = list[mx.array]  # of the levels, [n], or [B, G, pages, 1, 1, n]


@cache
def _books(codebooks: tuple[tuple[float, ...], ...]) -> Books:
    """Return the given codebooks, or if empty those of Gaussian vectors."""
    books = codebooks or (levels.angles(i, bits) for i, bits in enumerate(TREE_BITS, 1))
    return [mx.array(np.asarray(book, np.float32)) for book in books]


def to_polar(x: mx.array) -> tuple[mx.array, list[mx.array]]:
    """Return radii [..., R/16] and angles per level [..., R/2] .. [..., R/16] of x [..., R] float32."""
    radii = x
    angles: list[mx.array] = []
    for _ in TREE_BITS:
        pairs = mx.reshape(radii, (*radii.shape[:-1], -1, 2))
        angle = mx.arctan2(pairs[..., 1], pairs[..., 0])
        angles.append(mx.where(angle < 0, angle + levels.TURN, angle))
        radii = mx.sqrt((pairs * pairs).sum(-1))
    return radii, angles


def _nearest(angles: mx.array, book: mx.array) -> mx.array:
    """Return uint32 codes, shaped like `angles`, of the nearest entry of book [n] or [..., 1, 1, n]; ties round
    down."""
    code = mx.zeros(angles.shape, mx.uint32)
    for low, high in pairwise(book[..., i] for i in range(book.shape[-1])):
        code = code + (angles > (low + high) / 2)
    return code


def _fitted(angles: mx.array, valid: mx.array, start: mx.array) -> mx.array:
    """Run k-means from `start` [n] over the last two axes of angles, ignoring angles that are not `valid`.

    angles, valid: [..., T, m] -> [..., n]. Spec: `spec.polar_tree.fit_codebook`.
    """
    count = start.shape[0]
    book = mx.broadcast_to(start, (*angles.shape[:-2], 1, 1, count))
    angles = mx.where(valid, angles, 0.0)
    for _ in range(TREE_STEPS):
        codes = _nearest(angles, book)
        means: list[mx.array] = []
        for i in range(count):
            members = mx.logical_and(codes == i, valid)
            number = members.sum((-1, -2))
            total = mx.where(members, angles, 0.0).sum((-1, -2))
            old = book[..., 0, 0, i]
            means.append(mx.where(number > 0, total / mx.maximum(number, 1), old))
        book = mx.stack(means, -1)[..., None, None, :]
    return book[..., 0, 0, :]


def _fit_levels(x: mx.array) -> tuple[mx.array, list[mx.array], Books]:
    """Return radii, angles and codebooks [..., n] per level of x [..., T, R]."""
    radii, angles = to_polar(x)
    sizes = x
    books: Books = []
    for angle, start in zip(angles, _books(()), strict=True):
        pairs = mx.reshape(sizes, (*sizes.shape[:-1], -1, 2))
        sizes = mx.sqrt((pairs * pairs).sum(-1))
        # (0, 0) has no angle, and NaN or infinity would corrupt the page's codebook.
        valid = mx.logical_and(sizes > 0, mx.isfinite(sizes))
        books.append(_fitted(angle, valid, start))
    return radii, angles, books


def fit(x: mx.array) -> tuple[tuple[float, ...], ...]:
    """Fit `PolarTree.codebooks` by k-means on calibration vectors x [..., R], transformed by `Codec.store`."""
    _, _, books = _fit_levels(mx.reshape(x.astype(mx.float32), (-1, x.shape[-1])))
    return tuple(tuple(np.array(book).tolist()) for book in books)


def encode(quantizer: PolarTree, x: mx.array, page: int) -> dict[str, mx.array]:
    """Encode x [B, G, T, R], T a whole number of pages."""
    *lead, tokens, dims = x.shape
    pages = mx.reshape(x.astype(mx.float32), (*lead, tokens // page, page, dims))
    stored = {}
    if quantizer.online:
        radii, angles, books = _fit_levels(pages)
        stored["books"] = mx.concatenate(books, -1).astype(mx.float16)
        books = _page_books(stored["books"])
    else:
        (radii, angles), books = to_polar(pages), _books(quantizer.codebooks)
    codes = [_nearest(angle, book) for angle, book in zip(angles, books, strict=True)]
    codes = [mx.reshape(code, (*lead, tokens, -1)) for code in codes]
    return {**stored, **stored_of(codes, mx.reshape(half(radii), (*lead, tokens, -1)))}


def stored_of(codes: list[mx.array], radii: mx.array) -> dict[str, mx.array]:
    """Return the stored arrays of radii and codes per level, [B, G, T, R / 2^level]."""
    upper = mx.concatenate(codes[1:], -1)
    upper = mx.reshape(upper, (*upper.shape[:2], upper.shape[2] // TREE_RECORD, -1))
    first, upper = packing.pack(codes[0], TREE_BITS[0]), packing.pack(upper, TREE_BITS[1])
    return {"first": first, "upper": upper, "radii": radii}


def split(
    quantizer: PolarTree, stored: dict[str, mx.array], dims: int, page: int
) -> tuple[mx.array, dict[str, mx.array]]:
    """Return codes of 3 bits [B, G, T, R], as records hold them, and the other tensors.

    The low two bits of dims 2 i and 2 i + 1 are the angle of level 1. The high bits of dims 8 i .. 8 i + 7 are the
    angles of level 3, of level 4 (repeated in both halves of 16 dims), then both of level 2, two bits each.
    """
    first, second, third, fourth = codes_of(stored, dims, page)
    low = mx.reshape(mx.stack([first & 3, first >> 2], -1), (*first.shape[:-1], dims))
    second = mx.reshape(second, (*second.shape[:-1], -1, 2))
    angles = mx.stack([third, mx.repeat(fourth, 2, axis=-1), second[..., 0], second[..., 1]], -1)
    high = mx.reshape(mx.stack([angles & 1, angles >> 1], -1), low.shape)
    codes = low + (high << 2)
    return mx.reshape(codes, (*codes.shape[:2], -1, dims)), stored


def join(
    quantizer: PolarTree, codes: mx.array, numbers: dict[str, mx.array]
) -> dict[str, mx.array]:
    """Invert `split`."""
    low = mx.reshape(codes & 3, (*codes.shape[:-1], -1, 2))
    high = mx.reshape(codes >> 2, (*codes.shape[:-1], -1, 4, 2))
    angles = high[..., 0] + 2 * high[..., 1]
    second = mx.reshape(angles[..., 2:], (*codes.shape[:-1], -1))
    first = low[..., 0] + 4 * low[..., 1]
    levels_codes = [first, second, angles[..., 0], angles[..., ::2, 1]]
    return {**numbers, **stored_of(levels_codes, numbers["radii"])}


def _page_books(books: mx.array) -> Books:
    """[B, G, pages, 28] float16 -> codebooks of the levels, [B, G, pages, 1, 1, n] float32."""
    edges = np.cumsum(TREE_SIZES[:-1]).tolist()
    return [book[..., None, None, :] for book in mx.split(books.astype(mx.float32), edges, -1)]


def codes_of(stored: dict[str, mx.array], dims: int, page: int) -> list[mx.array]:
    """Return the codes per level of the stored arrays, [B, G, pages, page, R / 2^level]."""
    first = packing.unpack(stored["first"], TREE_BITS[0], dims // 2)
    lead = first.shape[:2]
    upper = packing.unpack(stored["upper"], TREE_BITS[1], 7 * TREE_RECORD * dims // 16)
    upper = mx.reshape(upper, (*lead, -1, page, 7 * dims // 16))
    parts = mx.split(upper, [dims // 4, 3 * dims // 8], -1)
    return [mx.reshape(first, (*lead, -1, page, dims // 2)), *parts]


def _split(radii: mx.array, code: mx.array, book: mx.array) -> mx.array:
    """Split radii [..., m] into (r cos a, r sin a), [..., 2 m]."""
    pairs = mx.stack([mx.cos(book), mx.sin(book)], -1)  # few cosines, looked up many times
    if book.ndim == 1:
        return mx.reshape(pairs[code] * radii[..., None], (*radii.shape[:-1], -1))
    shape = (*pairs.shape[:3], book.shape[-1], 2)
    at = mx.reshape(code, (*code.shape[:3], -1))[..., None]
    points = mx.take_along_axis(mx.reshape(pairs, shape), at, axis=3)
    points = mx.reshape(points, (*code.shape, 2))
    return mx.reshape(points * radii[..., None], (*radii.shape[:-1], -1))


def decode(
    quantizer: PolarTree, stored: dict[str, mx.array], dims: int, page: int, dtype: mx.Dtype
) -> mx.array:
    """Decode to [B, G, T, R] in `dtype`, from the radii down to the dims."""
    codes = codes_of(stored, dims, page)
    books = _page_books(stored["books"]) if quantizer.online else _books(quantizer.codebooks)
    radii = mx.reshape(stored["radii"].astype(mx.float32), (*codes[-1].shape,))
    for code, book in zip(reversed(codes), reversed(books), strict=True):
        radii = _split(radii, code, book)
    return mx.reshape(radii, (*stored["radii"].shape[:3], dims)).astype(dtype)
