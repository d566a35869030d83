"""Quantizers as frozen data: codebooks (TurboQuant) and polar trees (PolarQuant of Han et al.).

Letters: `R` stored dims per token, `page` tokens encoded together.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxkv.errors import UserError
from mlxkv.formats.affine import Method

CODEBOOK_BITS = (1, 2, 3, 4)
MIN_DIMS = 16  # with fewer, rotated coordinates do not look Gaussian
TREE = 16  # dims that share a radius
TREE_BITS = (4, 2, 2, 2)  # bits of an angle, by level: Han et al., section 4.1
TREE_SIZES = tuple(2**bits for bits in TREE_BITS)  # angles of a codebook, by level
TREE_STEPS = 8  # of the k-means that fits codebooks
TREE_RECORD = 16  # tokens whose upper levels are packed together, to fill whole words for every R


@dataclass(frozen=True)
class Codebook(Method):
    """TurboQuant (arXiv 2504.19874), algorithm 1: `x ~ norm * levels[code]`, with a 16-bit norm per token.

    A random rotation turns any vector into a uniform point on the sphere; the levels are the best for
    the coordinates of such a point.

    bits: bits per coordinate, 1 to 4.
    """

    bits: int

    def __post_init__(self):
        if self.bits not in CODEBOOK_BITS:
            choices = ", ".join(map(str, CODEBOOK_BITS))
            raise UserError(f"[Codebook] unknown bits; got {self.bits}; choose from {choices}")

    @property
    def tensors(self) -> set[str]:
        """The tensors of pages: codes [B, G, T, W] words, scale float16 [B, G, T, 1]."""
        return {"codes", "scale"}

    @property
    def label(self) -> str:
        return f"codebook of {self.bits} bits, norm per token"

    def bits_per_value(self, dims: int, page: int) -> float:
        words = -(-dims * self.bits // 32)
        return (32 * words + 16) / dims

    def why_not(self, dims: int, page: int) -> str | None:
        if dims < MIN_DIMS:
            return f"a codebook needs {MIN_DIMS} dims or more to share a norm, here are {dims}"
        return None


@dataclass(frozen=True)
class PolarTree(Method):
    """PolarQuant of Han et al. (arXiv 2502.02617): one 16-bit radius and 15 angles for each 16 dims.

    Pairs of dims take 4 bits of angle, pairs of radii 2 bits at each of three levels: 3.875 bits per value.

    codebooks: 16, 4, 4 and 4 ascending angles for the four levels, from `codec.polar_tree.fit` ("offline");
        empty: the best for Gaussian vectors.
    online: fit codebooks to each page and store them with it.
    """

    codebooks: tuple[tuple[float, ...], ...] = ()
    online: bool = False

    def __post_init__(self):
        books = tuple(tuple(float(a) for a in book) for book in self.codebooks)
        object.__setattr__(self, "codebooks", books)
        sizes = list(TREE_SIZES)
        if books and [len(book) for book in books] != sizes:
            counts = ", ".join(str(len(book)) for book in books)
            raise UserError(
                f"[PolarTree] codebooks must have 16, 4, 4 and 4 angles; got {counts}; choose those of "
                "codec.polar_tree.fit, or none"
            )
        if any(list(book) != sorted(book) for book in books):
            raise UserError("[PolarTree] angles of a codebook must ascend; got others")
        if books and self.online:
            raise UserError("[PolarTree] codebooks are given or online; got both; choose one")

    @property
    def label(self) -> str:
        kind = "online" if self.online else "offline" if self.codebooks else "analytic"
        return f"polar tree, 4/2/2/2 bits, {kind} codebooks, radius per 16"

    @property
    def tensors(self) -> set[str]:
        """The tensors of pages: first [B, G, T, R/16] words, the R/2 angles of level 1, 4 bits each; upper
        [B, G, T/16, 7R/16] words, of 16 tokens the angles of levels 2, 3 and 4, 2 bits each; radii float16
        [B, G, T, R/16]; online also books float16 [B, G, pages, 28], level by level."""
        return {"first", "upper", "radii"} | ({"books"} if self.online else set())

    def bits_per_value(self, dims: int, page: int) -> float:
        angles = sum(bits / 2**level for level, bits in enumerate(TREE_BITS, 1))
        books = self.online * 16 * sum(2**bits for bits in TREE_BITS) / (dims * page)
        return angles + 16 / TREE + books

    def why_not(self, dims: int, page: int) -> str | None:
        if dims % TREE:
            return f"a polar tree needs a multiple of {TREE} dims, here are {dims}"
        return None
