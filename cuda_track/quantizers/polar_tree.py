"""Polar trees (PolarQuant of Han et al.) by torch ops. Spec: `reference_polar_tree`.

Stored per side, T a whole number of pages:
    first  int32   [B, G, T, R/16], the R/2 angles of level 1, 4 bits each
    upper  int32   [B, G, T/16, 7R/16], of 16 tokens the angles of levels 2, 3 and 4, 2 bits each
    radii  float16 [B, G, T, R/16]
    books  float16 [B, G, pages, 28], the codebooks of a page, level by level; online alone
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import torch

from cuda_track import packing
from cuda_track.quantizers.affine import half
from mlxkv import levels
from mlxkv.formats_codebook import TREE_BITS, TREE_RECORD, PolarTree

SIZES = tuple(2**bits for bits in TREE_BITS)
STEPS = 8  # of k-means
Books = list[torch.Tensor]  # of the levels, [n], or [B, G, pages, 1, 1, n]


def names(spec: PolarTree) -> set[str]:
    """The tensors that a page is stored in."""
    return {"first", "upper", "radii"} | ({"books"} if spec.online else set())


@cache
def _books(given: tuple[tuple[float, ...], ...], device: torch.device) -> Books:
    """Those of the spec, or of Gaussian vectors."""
    books = given or (levels.angles(i, bits) for i, bits in enumerate(TREE_BITS, 1))
    return [torch.tensor(np.asarray(book, np.float32), device=device) for book in books]


def to_polar(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """x: [..., R] float32 -> radii [..., R/16], angles of the levels [..., R/2] .. [..., R/16]."""
    radii, angles = x, []
    for _ in TREE_BITS:
        first, second = radii[..., ::2], radii[..., 1::2]
        angle = torch.atan2(second, first)
        angles.append(torch.where(angle < 0, angle + levels.TURN, angle))
        radii = (first * first + second * second).sqrt()
    return radii, angles


def _nearest(angles: torch.Tensor, book: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest of book [n] or [..., 1, 1, n]; ties go down."""
    code = torch.zeros_like(angles, dtype=torch.int32)
    for low, high in pairwise(book.unbind(-1)):
        code += angles > (low + high) / 2
    return code


def _fitted(angles: torch.Tensor, there: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """k-means from `start` [n] over the last two axes of angles; `there` says which angles count.

    angles, there: [..., T, m] -> [..., n]. Spec: `reference_polar_tree.fit_codebook`.
    """
    book = start.expand(*angles.shape[:-2], 1, 1, len(start))
    for _ in range(STEPS):
        near, means = _nearest(angles, book), []
        for i in range(len(start)):
            mine = (near == i) & there
            number = mine.sum((-1, -2))
            total = torch.where(mine, angles, 0.0).sum((-1, -2))
            means.append(torch.where(number > 0, total / number.clamp(min=1), book[..., 0, 0, i]))
        book = torch.stack(means, -1)[..., None, None, :]
    return book[..., 0, 0, :]


def _fit_levels(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], Books]:
    """x: [..., T, R] -> radii, angles, and codebooks [..., n] of the levels."""
    radii, angles = to_polar(x)
    books, sizes = [], x
    for angle, start in zip(angles, _books((), x.device), strict=True):
        sizes = (sizes[..., ::2].square() + sizes[..., 1::2].square()).sqrt()
        # (0, 0) has no angle, and what is no number would spoil the page of its neighbours.
        books.append(_fitted(angle, (sizes > 0) & sizes.isfinite(), start))
    return radii, angles, books


def fit(x: torch.Tensor) -> tuple[tuple[float, ...], ...]:
    """Offline codebooks: those of `PolarTree.codebooks`, by k-means on the vectors x [..., R] of a
    calibration, after the transform of the side (`Codec.store`)."""
    _, _, books = _fit_levels(x.float().reshape(-1, x.shape[-1]))
    return tuple(tuple(book.tolist()) for book in books)


def encode(spec: PolarTree, x: torch.Tensor, page: int) -> dict[str, torch.Tensor]:
    """x: [B, G, T, R], T a whole number of pages."""
    *lead, tokens, dims = x.shape
    pages = x.float().reshape(*lead, tokens // page, page, dims)
    stored = {}
    if spec.online:
        radii, angles, books = _fit_levels(pages)
        stored["books"] = torch.cat(books, -1).half()
        books = _page_books(stored["books"])
    else:
        (radii, angles), books = to_polar(pages), _books(spec.codebooks, x.device)
    codes = [_nearest(angle, book) for angle, book in zip(angles, books, strict=True)]
    codes = [code.reshape(*lead, tokens, -1) for code in codes]
    return {**stored, **stored_of(codes, half(radii).reshape(*lead, tokens, -1))}


def stored_of(codes: list[torch.Tensor], radii: torch.Tensor) -> dict[str, torch.Tensor]:
    """Codes of the levels [B, G, T, R / 2^level] and radii as they are stored."""
    upper = torch.cat(codes[1:], -1)
    upper = upper.reshape(*upper.shape[:2], upper.shape[2] // TREE_RECORD, -1)
    first, upper = packing.pack(codes[0], TREE_BITS[0]), packing.pack(upper, TREE_BITS[1])
    return {"first": first, "upper": upper, "radii": radii}


def split(stored: dict[str, torch.Tensor], dims: int, page: int) -> torch.Tensor:
    """What is stored -> codes of 3 bits [B, G, T, R], as records hold them.

    The two low bits of dims 2 i and 2 i + 1 are the angle of level 1. High bits of dims 8 i .. 8 i + 7:
    the angles of level 3 and of level 4 (which the two halves of 16 dims both have), then both of
    level 2, two bits each.
    """
    one, two, three, four = codes_of(stored, dims, page)
    low = torch.stack([one & 3, one >> 2], -1).flatten(-2)
    two = two.unflatten(-1, (-1, 2))
    angles = [three, four.repeat_interleave(2, -1), two[..., 0], two[..., 1]]
    angles = torch.stack(angles, -1)
    high = torch.stack([angles & 1, angles >> 1], -1).reshape(low.shape)
    return (low + (high << 2)).flatten(2, 3)


def join(codes: torch.Tensor, radii: torch.Tensor) -> dict[str, torch.Tensor]:
    """The inverse of `split`, with the radii [B, G, T, R/16]."""
    low = (codes & 3).unflatten(-1, (-1, 2))
    high = (codes >> 2).unflatten(-1, (-1, 4, 2))
    angles = high[..., 0] + 2 * high[..., 1]
    one = low[..., 0] + 4 * low[..., 1]
    two = angles[..., 2:].flatten(-2)
    return stored_of([one, two, angles[..., 0], angles[..., ::2, 1]], radii)


def _page_books(books: torch.Tensor) -> Books:
    """[B, G, pages, 28] float16 -> those of the levels, [B, G, pages, 1, 1, n] float32."""
    return [book[..., None, None, :] for book in books.float().split(SIZES, -1)]


def codes_of(stored: dict[str, torch.Tensor], dims: int, page: int) -> list[torch.Tensor]:
    """Codes of the levels, [B, G, pages, page, R / 2^level], of what is stored."""
    first = packing.unpack(stored["first"], TREE_BITS[0], dims // 2)
    lead = first.shape[:2]
    upper = packing.unpack(stored["upper"], TREE_BITS[1], 7 * TREE_RECORD * dims // 16)
    upper = upper.reshape(*lead, -1, page, 7 * dims // 16)
    parts = upper.split([dims // 4, dims // 8, dims // 16], -1)
    return [first.reshape(*lead, -1, page, dims // 2), *parts]


def decode(
    spec: PolarTree, stored: dict[str, torch.Tensor], dims: int, page: int, dtype: torch.dtype
) -> torch.Tensor:
    """[B, G, T, R] in `dtype`: from the radii down to the dims."""
    codes = codes_of(stored, dims, page)
    device = stored["radii"].device
    books = _page_books(stored["books"]) if spec.online else _books(spec.codebooks, device)
    radii = stored["radii"].float().reshape(codes[-1].shape)
    for code, book in zip(reversed(codes), reversed(books), strict=True):
        angle = _looked_up(book, code)
        pairs = torch.stack([radii * angle.cos(), radii * angle.sin()], -1)
        radii = pairs.reshape(*pairs.shape[:-2], -1)
    return radii.reshape(*stored["radii"].shape[:3], dims).to(dtype)


def _looked_up(book: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    """Angles of codes: book [n], or one per page [..., 1, 1, n]."""
    if book.ndim == 1:
        return book[code.long()]
    return book[..., 0, 0, :].gather(-1, code.flatten(-2).long()).view(code.shape)


def scores(
    spec: PolarTree, q: torch.Tensor, stored: dict[str, torch.Tensor], dims: int, page: int
) -> torch.Tensor:
    """q: [B, G, N, R] float32 -> q . x^ for every stored token: [B, G, N, T]."""
    return q @ decode(spec, stored, dims, page, q.dtype).mT


def mix(
    spec: PolarTree, p: torch.Tensor, stored: dict[str, torch.Tensor], dims: int, page: int
) -> torch.Tensor:
    """p: [B, G, N, T] float32 -> sum_t p_t x^_t: [B, G, N, R]."""
    return p @ decode(spec, stored, dims, page, p.dtype)
