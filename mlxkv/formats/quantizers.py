"""Quantizers as frozen data: full precision, affine codes, codebooks (TurboQuant), and polar coordinates: with ranges
per tile (the page of one kv head; Wu et al.), and as trees (Han et al.).

Letters: `R` stored dims per token, `page` tokens encoded together.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import ClassVar, Literal

from mlxkv.errors import UserError

BITS = (2, 3, 4, 8)
MIN_GROUP = 16  # below this the scales outweigh the codes
HALF_MAX = 65504.0  # the largest float16
CODEBOOK_BITS = (1, 2, 3, 4)
MIN_DIMS = 16  # with fewer, rotated coordinates do not look Gaussian
TREE = 16  # dims that share a radius
TREE_BITS = (4, 2, 2, 2)  # bits of an angle, by level: Han et al., section 4.1
TREE_SIZES = tuple(2**bits for bits in TREE_BITS)  # angles of a codebook, by level
TREE_STEPS = 8  # of the k-means that fits codebooks
TREE_RECORD = 16  # tokens whose upper levels are packed together, to fill whole words for every R
POLAR_BITS = (1, 2, 3, 4)
POLAR_NUMBERS = ("radius_step", "radius_low", "angle_step", "angle_low")
LEAST_TILE = 32  # tokens: the standard deviation or range of fewer says little


class Method:
    """A quantizer. A subclass has `method`, its name in saved files, `tensors`, the names of the tensors of
    pages, and says its label."""

    method: ClassVar[str]
    tensors: set[str]

    def describe(self, bits: str | None = None) -> str:
        """Return what reports say of it; bits: in place of its own."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """The method and its bits, for reports."""
        return self.describe()

    def bits_per_value(self, dims: int, page: int) -> float:
        """Return stored bits per stored value."""
        raise NotImplementedError

    def why_not(self, dims: int, page: int) -> str | None:
        """Return why `dims` stored dims in pages of `page` tokens cannot be encoded, or None."""
        return None

    def clip_rank(self, dims: int) -> int:
        """Return which absolute value of a token is the limit, counted from the largest; 1 clips nothing."""
        return 1


@dataclass(frozen=True)
class Full(Method):
    """Store values unchanged, in the model's own type."""

    method: ClassVar[str] = "full"

    def describe(self, bits: str | None = None) -> str:
        return "full precision"

    @property
    def tensors(self) -> set[str]:
        """The tensor of pages: values [B, G, T, R], in the type of the model."""
        return {"values"}

    def bits_per_value(self, dims: int, page: int) -> float:
        return 16.0  # for a 16-bit model


@dataclass(frozen=True)
class Affine(Method):
    """Uniform codes: `x ~ scale * code + bias`, one 16-bit scale (and bias) per group.

    bits: bits per code: 2, 3, 4 or 8.
    group: values that share a scale, 0 for all. Along the stored dims for axis "token", where the
        last group may be short (80 dims: 64 + 16); along the tokens of a page for axis "channel".
    symmetric: abs-max around zero, codes -(2^(b-1)-1) .. 2^(b-1)-1 (SRFT paper, section 3.2), no
        stored bias. Otherwise min-max with a stored bias.
    clip: share of a token's stored dims, by absolute value, that stay below the limit (OSCAR: keys .96,
        values .92); the others are clipped to it. 1 clips nothing. Axis "token" only.
    shared: all tokens of a page and all kv heads share one abs-max scale (per-tensor scaling, SRFT paper,
        section 4.1); every token holds it, so that kernels read it as they read group 0.
    """

    method: ClassVar[str] = "affine"

    bits: int
    group: int = 64
    symmetric: bool = False
    axis: Literal["token", "channel"] = "token"
    clip: float = 1.0
    shared: bool = False

    def __post_init__(self):
        if self.bits not in BITS:
            choices = ", ".join(map(str, BITS))
            raise UserError(f"[Affine] unknown bits; got {self.bits}; choose from {choices}")
        if self.axis not in ("token", "channel"):
            raise UserError(f"[Affine] unknown axis; got {self.axis!r}; choose from token, channel")
        if self.group and self.group < MIN_GROUP:
            raise UserError(f"[Affine] group must be 0 or at least {MIN_GROUP}; got {self.group}")
        if not 0 < self.clip <= 1:
            raise UserError(f"[Affine] clip must be above 0 and at most 1; got {self.clip}")
        if self.clip < 1 and self.axis != "token":
            raise UserError(
                f'[Affine] clip {self.clip} is a share of a token: it needs axis "token"; '
                f"got {self.axis!r}"
            )
        if self.shared and (
            not self.symmetric or self.group or self.axis != "token" or self.clip < 1
        ):
            raise UserError(f"[Affine] shared is for abs-max codes of group 0 alone; got {self}")

    def describe(self, bits: str | None = None) -> str:
        bits = bits or str(self.bits)
        if self.shared:
            return f"int{bits} symmetric, a scale per page"
        shape = "symmetric" if self.symmetric else "min-max"
        clip = f", clip {self.clip:g}".replace(" 0.", " .") if self.clip < 1 else ""
        return f"int{bits} {shape}, group {self.group or 'all'} per {self.axis}{clip}"

    @property
    def tensors(self) -> set[str]:
        """The tensors of pages: codes [B, G, T, W] words, scale and bias float16, [B, G, T, ceil(R/g)] (axis
        token) or [B, G, T/g, R] (axis channel). A symmetric side has no bias."""
        return {"codes", "scale"} if self.symmetric else {"codes", "scale", "bias"}

    def format(self, dims: int, page: int) -> str:
        """Return the key of a searched clip: "int2 g64", also for group 128 of 64 dims."""
        size = f"int{self.bits} g{self.group_size(dims, page)}"
        return size + (" symmetric" if self.symmetric else "") + (" shared" if self.shared else "")

    def clip_rank(self, dims: int) -> int:
        return dims - min(floor(self.clip * dims + 1e-9), dims - 1)

    def group_size(self, dims: int, page: int) -> int:
        """Return the values per scale."""
        axis_size = dims if self.axis == "token" else page
        return min(self.group or axis_size, axis_size)

    def bits_per_value(self, dims: int, page: int) -> float:
        words = -(-dims * self.bits // 32)
        numbers = 1 if self.symmetric else 2
        size = self.group_size(dims, page)
        scales = -(-dims // size) / dims if self.axis == "token" else 1 / size
        return 32 * words / dims + 16 * numbers * scales

    def why_not(self, dims: int, page: int) -> str | None:
        if self.axis == "channel" and page % self.group_size(dims, page):
            return f"a page of {page} tokens is no multiple of the group {self.group}"
        return None


@dataclass(frozen=True)
class Codebook(Method):
    """TurboQuant (arXiv 2504.19874), algorithm 1: `x ~ norm * levels[code]`, with a 16-bit norm per token.

    A random rotation maps any vector to a uniform point on the sphere; the levels are the best for
    the coordinates of such a point.

    bits: bits per coordinate, 1 to 4.
    """

    method: ClassVar[str] = "codebook"

    bits: int

    def __post_init__(self):
        if self.bits not in CODEBOOK_BITS:
            choices = ", ".join(map(str, CODEBOOK_BITS))
            raise UserError(f"[Codebook] unknown bits; got {self.bits}; choose from {choices}")

    @property
    def tensors(self) -> set[str]:
        """The tensors of pages: codes [B, G, T, W] words, scale float16 [B, G, T, 1]."""
        return {"codes", "scale"}

    def describe(self, bits: str | None = None) -> str:
        return f"codebook of {bits or self.bits} bits, norm per token"

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

    method: ClassVar[str] = "polartree"

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

    def describe(self, bits: str | None = None) -> str:
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


@dataclass(frozen=True)
class Polar(Method):
    """PolarQuant (Wu et al., arXiv 2502.00527): dims i and i + R/2, which RoPE rotates together, as polar
    coordinates. For keys after RoPE, without a transform.

    radius, angle: bits of each, 1 to 4. Each has a range per pair over the tokens of a page; a code
        decodes to the middle of its step.
    """

    method: ClassVar[str] = "polar"

    radius: int = 4
    angle: int = 4
    axis: ClassVar[str] = "channel"
    symmetric: ClassVar[bool] = False

    def __post_init__(self):
        for name in ("radius", "angle"):
            if (bits := getattr(self, name)) not in POLAR_BITS:
                choices = ", ".join(map(str, POLAR_BITS))
                raise UserError(f"[Polar] unknown {name} bits; got {bits}; choose from {choices}")

    @property
    def bits(self) -> int:
        """Bits of the wider of the two."""
        return max(self.radius, self.angle)

    @property
    def pair_bits(self) -> int:
        """Bits per code: the radius above the angle."""
        return self.radius + self.angle

    def describe(self, bits: str | None = None) -> str:
        radius, angle = bits or self.radius, bits or self.angle
        return f"polar, radius int{radius} and angle int{angle} per pair of channels"

    @property
    def tensors(self) -> set[str]:
        """The tensors of P pages: codes [B, G, T, W] words, R/2 codes of a token, the radius above the
        angle; float16 numbers [B, G, P, R/2]."""
        return {"codes", *POLAR_NUMBERS}

    def group_size(self, dims: int, page: int) -> int:
        """Return the values per range: the tokens of a page."""
        return page

    def bits_per_value(self, dims: int, page: int) -> float:
        words = -(-dims * self.pair_bits // 64)
        return 32 * words / dims + 16 * 2 / page

    def why_not(self, dims: int, page: int) -> str | None:
        if dims % 2:
            return f"polar takes pairs of dims; got {dims}"
        if page < LEAST_TILE:
            return f"a page of {page} tokens is no tile; it takes {LEAST_TILE} at least"
        return None
