"""Polar trees (PolarQuant of Han et al.) by torch ops. Spec: `mlxkv.spec.polar_tree`; stored: `PolarTree.tensors`.

A codebook is [n], one for all, or [B, G, P, 1, 1, n], one for each of P pages.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from cuda_track.codec import packing
from cuda_track.codec.affine import half
from mlxkv.formats import levels
from mlxkv.formats.layout import TREE_BITS
from mlxkv.formats.quantizers import TREE, TREE_RECORD, TREE_SIZES, TREE_STEPS, PolarTree

Books = list[torch.Tensor]  # of the levels
WIDTH = TREE // 2 - 1  # angles of the upper levels for each 16 dims


@cache
def _books(books: tuple[tuple[float, ...], ...], device: torch.device) -> Books:
    """Return the codebooks of a quantizer; () for those of Gaussian vectors."""
    angles = books or [levels.angles(i, bits) for i, bits in enumerate(TREE_BITS, 1)]
    return [torch.tensor(np.asarray(book, np.float32), device=device) for book in angles]


def to_polar(x: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Radii and angles of the levels of x [..., R] float32: [..., R/2] .. [..., R/16]."""
    radii, angles = [x], []
    for _ in TREE_BITS:
        first, second = radii[-1].unflatten(-1, (-1, 2)).unbind(-1)
        angle = torch.atan2(second, first)
        angles.append(angle.where(angle >= 0, angle + levels.TURN))
        radii.append((first * first + second * second).sqrt())
    return radii[1:], angles


def _nearest(angles: torch.Tensor, book: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest angles of a book; ties go down."""
    code = torch.zeros_like(angles, dtype=torch.int32)
    for middle in ((book[..., 1:] + book[..., :-1]) / 2).unbind(-1):
        code += angles > middle
    return code


def _fitted(angles: torch.Tensor, valid: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Fit codebooks [..., 1, 1, n] to angles [..., T, m] by k-means from `start` [n].

    counted: the angles that count.
    """
    book = start.expand(*angles.shape[:-2], 1, 1, -1)
    for _ in range(TREE_STEPS):
        nearest, old = _nearest(angles, book), book
        members = [(nearest == i) & valid for i in range(len(start))]
        sums = torch.stack([angles.where(member, 0.0).sum((-1, -2)) for member in members], -1)
        sizes = torch.stack([member.sum((-1, -2)) for member in members], -1)
        means = (sums / sizes.clamp(min=1))[..., None, None, :]
        book = means.where(sizes[..., None, None, :] > 0, old)
    return book


def _fit_levels(x: torch.Tensor) -> Books:
    """x: [..., T, R] -> the codebooks of the levels."""
    parts = zip(*to_polar(x), _books((), x.device), strict=True)
    # (0, 0) has no angle, and one vector that is no number would spoil the page.
    return [_fitted(angle, (r > 0) & r.isfinite(), start) for r, angle, start in parts]


def fit(x: torch.Tensor) -> tuple[tuple[float, ...], ...]:
    """Fit `PolarTree.codebooks` to vectors x [..., R] of a calibration, after the transform of the side."""
    books = _fit_levels(x.float().flatten(0, -2))
    return tuple(tuple(book.flatten().tolist()) for book in books)


def encode(quantizer: PolarTree, x: torch.Tensor, page: int) -> dict[str, torch.Tensor]:
    """x: [B, G, T, R], T a whole number of pages."""
    pages, stored = x.float().unflatten(2, (-1, page)), {}
    if quantizer.online:
        stored["books"] = torch.cat(_fit_levels(pages), -1).half()[..., 0, 0, :]
    radii, angles = to_polar(pages)
    books = _books_of(quantizer, stored, x.device)
    codes = [_nearest(angle, book).flatten(2, 3) for angle, book in zip(angles, books, strict=True)]
    return {**stored, **stored_of(codes, half(radii[-1]).flatten(2, 3))}


def _books_of(quantizer: PolarTree, stored: dict[str, torch.Tensor], device: torch.device) -> Books:
    if not quantizer.online:
        return _books(quantizer.codebooks, device)
    return list(stored["books"].float()[..., None, None, :].split(TREE_SIZES, -1))


def stored_of(codes: list[torch.Tensor], radii: torch.Tensor) -> dict[str, torch.Tensor]:
    """Pack codes of the levels [B, G, T, R / 2^level]."""
    upper = torch.cat(codes[1:], -1).unflatten(2, (-1, TREE_RECORD)).flatten(-2)
    first, upper = packing.pack(codes[0], TREE_BITS[0]), packing.pack(upper, TREE_BITS[1])
    return {"first": first, "upper": upper, "radii": radii}


def codes_of(stored: dict[str, torch.Tensor], dims: int, page: int) -> list[torch.Tensor]:
    """Invert `stored_of`: codes of the levels, [B, G, P, page, R / 2^level]."""
    trees = dims // TREE
    upper = packing.unpack(stored["upper"], TREE_BITS[1], WIDTH * TREE_RECORD * trees)
    upper = upper.unflatten(-1, (TREE_RECORD, -1)).flatten(2, 3)
    codes = (
        packing.unpack(stored["first"], TREE_BITS[0], dims // 2),
        *upper.split([4 * trees, 2 * trees, trees], -1),
    )
    return [code.unflatten(2, (-1, page)) for code in codes]


def join(
    quantizer: PolarTree, codes: torch.Tensor, numbers: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Pack the codes of 3 bits [B, G, T, R] of page records, beside the other tensors.

    The two low bits of dims 2 i and 2 i + 1 are the angle of level 1. High bits of dims 8 i .. 8 i + 7:
    the angles of level 3 and of level 4 (the same for both halves of 16 dims), then both of level 2,
    two bits each.
    """
    low, high = (codes & 3).unflatten(-1, (-1, 2)), (codes >> 2).unflatten(-1, (-1, 4, 2))
    three, four, *two = (high[..., 0] + 2 * high[..., 1]).unbind(-1)
    first, two = low[..., 0] + 4 * low[..., 1], torch.stack(two, -1).flatten(-2)
    return {**numbers, **stored_of([first, two, three, four[..., ::2]], numbers["radii"])}


def decode(
    quantizer: PolarTree, stored: dict[str, torch.Tensor], dims: int, page: int, dtype: torch.dtype
) -> torch.Tensor:
    """[B, G, T, R] in `dtype`: from the radii down to the dims."""
    codes = codes_of(stored, dims, page)
    books = _books_of(quantizer, stored, stored["radii"].device)
    values = stored["radii"].float().unflatten(2, (-1, page))
    for code, book in reversed(list(zip(codes, books, strict=True))):
        if book.ndim == 1:
            angle = book[code.long()]
        else:
            angle = book[..., 0, 0, :].gather(-1, code.flatten(-2).long()).view(code.shape)
        values = torch.stack([values * angle.cos(), values * angle.sin()], -1).flatten(-2)
    return values.flatten(2, 3).to(dtype)
