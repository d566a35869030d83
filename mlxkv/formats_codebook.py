"""What codebook codes and polar trees store, as frozen data for `config.py`.

No framework is imported here. Letters: `R` stored dims per token, `page` tokens encoded together.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxkv.errors import UserError

CODEBOOK_BITS = (1, 2, 3, 4)
MIN_DIMS = 16  # of a rotation that makes coordinates look Gaussian
TREE = 16  # dims that share a radius
TREE_BITS = (4, 2, 2, 2)  # of an angle, by level: Han et al., section 4.1
TREE_RECORD = 16  # tokens whose upper levels are packed together: whole words for every R


def _words(dims: int, bits: int) -> int:
    return -(-dims * bits // 32)


@dataclass(frozen=True)
class Codebook:
    """TurboQuant: `x ~ norm * levels[code]`, a 16-bit norm per token and levels that are best for the
    coordinates of a point on the sphere, which is what a random rotation makes of any vector.

    bits: bits of a coordinate, 1 to 4, with those of `residual`.
    residual: one of the bits is the sign of a random projection of what the others leave (Alg. 2,
        QJL), with a 16-bit length per token: products with queries are unbiased, and noisier.
    outliers: the quarter of the channels that has most energy in a page gets a bit more (section
        4.3). Both parts have a rotation and a norm of their own: use it with transform "none".
    corrected: the stored norm is divided by that of the decoded unit vector, which levels make too
        short. No preset does: on the embedded models it was better where little was lost anyway.
    seed: of the projections.
    """

    bits: int
    residual: bool = False
    outliers: bool = False
    corrected: bool = False
    seed: int = 1

    def __post_init__(self):
        least, most = (2 if self.residual else 1), (3 if self.outliers else 4)
        if self.bits not in CODEBOOK_BITS[least - 1 : most]:
            choices = ", ".join(map(str, CODEBOOK_BITS[least - 1 : most]))
            raise UserError(f"[Codebook] unknown bits; got {self.bits}; choose from {choices}")
        if self.residual and self.outliers:
            raise UserError(
                "[Codebook] a residual stage has no outlier channels; got both; choose one"
            )

    @property
    def level_bits(self) -> int:
        """Bits of a code of the first stage."""
        return self.bits - self.residual

    @property
    def no_record(self) -> str | None:
        """Why no kernel reads such codes, or None."""
        if self.outliers:
            return "outlier channels turn every page differently, which no kernel does"
        return "codes of 1 bit have no record" if self.bits == 1 else None

    def clip_rank(self, dims: int) -> int:
        """As `Affine.clip_rank`: nothing is clipped."""
        return 1

    @property
    def label(self) -> str:
        extra = " + signs of the rest" if self.residual else ""
        extra += ", a quarter of the channels 1 bit more" if self.outliers else ""
        norm = "corrected norm" if self.corrected else "norm"
        return f"codebook of {self.level_bits} bits{extra}, {norm} per token"

    def parts(self, dims: int) -> tuple[tuple[int, int], ...]:
        """(dims, bits) of what is encoded by itself: outlier channels first."""
        if not self.outliers:
            return ((dims, self.level_bits),)
        few = dims // 4
        return (few, self.bits + 1), (dims - few, self.bits)

    def bits_per_value(self, dims: int, page: int) -> float:
        """Stored bits per value: codes and signs in whole 32-bit words, 16-bit norms, and a bit per
        channel and page that says whether it is an outlier."""
        words = sum(_words(*part) for part in self.parts(dims)) + self.residual * _words(dims, 1)
        norms = len(self.parts(dims)) + self.residual
        chosen = self.outliers * 32 * _words(dims, 1) / page
        return (32 * words + 16 * norms + chosen) / dims

    def why_not(self, dims: int, page: int) -> str | None:
        """Why `dims` stored dims in pages of `page` tokens cannot be encoded, or None."""
        least = min(n for n, _ in self.parts(dims))
        if least < MIN_DIMS:
            return f"a codebook needs {MIN_DIMS} dims or more to share a norm, here are {least}"
        return None


@dataclass(frozen=True)
class PolarTree:
    """PolarQuant of Han et al.: for each 16 dims a 16-bit radius and 15 angles, of 4 bits for pairs of
    dims and 2 bits for pairs of their radii, and so on: 3.875 bits per value.

    codebooks: of the four levels, 16, 4, 4 and 4 ascending angles, from
        `quantizers.polar_tree.fit` ("offline"); none: those that are best for Gaussian vectors.
    online: codebooks are fitted to each page and stored with it.
    """

    codebooks: tuple[tuple[float, ...], ...] = ()
    online: bool = False

    def __post_init__(self):
        books = tuple(tuple(float(a) for a in book) for book in self.codebooks)
        object.__setattr__(self, "codebooks", books)
        wanted = [2**bits for bits in TREE_BITS]
        if books and [len(book) for book in books] != wanted:
            got = ", ".join(str(len(book)) for book in books)
            raise UserError(
                f"[PolarTree] codebooks must have 16, 4, 4 and 4 angles; got {got}; choose those of "
                "quantizers.polar_tree.fit, or none"
            )
        if any(list(book) != sorted(book) for book in books):
            raise UserError("[PolarTree] angles of a codebook must ascend; got others")
        if books and self.online:
            raise UserError("[PolarTree] codebooks are given or online; got both; choose one")

    @property
    def label(self) -> str:
        kind = "online" if self.online else "offline" if self.codebooks else "analytic"
        return f"polar tree, 4/2/2/2 bits, {kind} codebooks, radius per 16"

    def bits_per_value(self, dims: int, page: int) -> float:
        """Stored bits per value: angles, 16-bit radii, and the online codebooks of a page."""
        angles = sum(bits / 2**level for level, bits in enumerate(TREE_BITS, 1))
        books = self.online * 16 * sum(2**bits for bits in TREE_BITS) / (dims * page)
        return angles + 16 / TREE + books

    def why_not(self, dims: int, page: int) -> str | None:
        """Why `dims` stored dims in pages of `page` tokens cannot be encoded, or None."""
        if dims % TREE:
            return f"a polar tree needs a multiple of {TREE} dims, here are {dims}"
        return None
