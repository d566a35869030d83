"""Quantizers as frozen data, a class for each method, and `METHODS`, the table of them all.

A class says what its pages hold and what that costs. `codec/NAME.py` of either track encodes and decodes.

Letters: `R` stored dims per token, `page` tokens encoded together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import floor
from typing import ClassVar, Literal

from mlxkv.errors import UserError
from mlxkv.formats.layout import BLOCK, HALF, TOKENS, TREE_BITS, SideLayout

BITS = (2, 3, 4, 8)
MIN_GROUP = 16  # below this the scales outweigh the codes
HALF_MAX = 65504.0  # the largest float16
CODEBOOK_BITS = (1, 2, 3, 4)
MIN_DIMS = 16  # with fewer, rotated coordinates do not look Gaussian
TREE = 16  # dims that share a radius
TREE_SIZES = tuple(2**bits for bits in TREE_BITS)  # angles of a codebook, by level
TREE_STEPS = 8  # of the k-means that fits codebooks
TREE_CODE = 3  # bits per dim of a polar tree in records: 46 of the 48 bits of 16 dims are used
TREE_RECORD = 16  # tokens whose upper levels are packed together, to fill whole words for every R
POLAR_BITS = (1, 2, 3, 4)
PAIR_PAGE = 64  # tokens that a threadgroup reads at a time with one table of pairs
MAX_PAIR_DIMS = 256  # the tables of more do not fit in threadgroup memory
POLAR_NUMBERS = ("radius_step", "radius_low", "angle_step", "angle_low")
DIMS = 16  # in a block of one width
WIDTHS = (8, 4, 3, 2, 1)  # bits that a block may have, beside 0
RATES = (0.5, 8.25)  # bits a value that may be asked for
# The uniform quantizer with an even number of levels that is best for a Gaussian number of variance 1 (Max, "Quantizing
# for minimum distortion", IRE IT-6, 1960, table II; 8 bits by the same equations): the width of its cells; by how much
# its levels are further apart, so that decoded numbers have variance 1, too; and the squared error then. 0 bits leave
# all of the variance. Spec: `mlxkv.spec.mixed_bits`.
STEPS = {1: 1.595769134, 2: 0.995686668, 3: 0.586019449, 4: 0.335200601, 8: 0.030762395}
GAINS = {1: 1.253314127, 2: 1.065305348, 3: 1.019262431, 4: 1.005821895, 8: 1.000043846}
ERRORS = {0: 1.0, 1: 0.404230878, 2: 0.122603985, 3: 0.037796809, 4: 0.011576388, 8: 0.000087688}
MOST_BLOCKS = 16  # of 16 dims with widths of their own
LEAST_TILE = 32  # tokens: the standard deviation or range of fewer says little


@dataclass(frozen=True)
class Quantizer:
    """Store transformed keys or values in one way: the base of every row of `METHODS`.

    A subclass must define `method`, `tensors`, `describe` and `bits_per_value`, and `layout` if page records
    hold it. Everything else has a default.

    method: its name in saved files.
    file: the name of its modules in `spec` and `codec`, where it differs from `method`.
    exact: whether pages hold values in the model's own type.
    codes: whether pages hold codes rather than numbers.
    rope_pairs: whether it stores the pairs of dims that RoPE rotates, so that no transform may mix them.
    """

    method: ClassVar[str]
    file: ClassVar[str] = ""
    exact: ClassVar[bool] = False
    codes: ClassVar[bool] = True
    rope_pairs: ClassVar[bool] = False

    @property
    def tensors(self) -> set[str]:
        """The names of the tensors of pages."""
        raise NotImplementedError

    def describe(self, bits: str | None = None) -> str:
        """Return the method and its bits, for reports. bits: printed in place of its own."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """The method and its bits, for reports."""
        return self.describe()

    @property
    def code_bits(self) -> int | None:
        """The bits of a code; None where codes differ in size."""
        return None

    @property
    def budget(self) -> float | None:
        """The bits per value that a calibration divides among blocks of dims, or None."""
        return None

    def stored_dims(self, head_dim: int) -> int:
        """Return how many dims of a transformed head are stored."""
        return head_dim

    def kind(self, transform: str) -> str:
        """Return the name by which a calibration keeps the maps of `transform` for this quantizer."""
        return transform

    def bits_per_value(self, dims: int, page: int) -> float:
        """Return stored bits per stored value."""
        raise NotImplementedError

    def why_not(self, dims: int, page: int) -> str | None:
        """Return why `dims` stored dims in pages of `page` tokens cannot be encoded, or None."""
        return None

    @property
    def clips(self) -> bool:
        """Whether a calibration may search for the share of a token that is not clipped."""
        return False

    def clip_rank(self, dims: int) -> int:
        """Return which absolute value of a token is the limit, counted from the largest; 1 clips nothing."""
        return 1

    def clipped(self, clip: float) -> Quantizer:
        """Return the same with another clip. Raises TypeError unless `clips`."""
        raise TypeError(f"{self.label} has no clip")

    def format(self, dims: int, page: int) -> str:
        """Return the name by which a calibration keeps searched clips. Raises TypeError unless `clips`."""
        raise TypeError(f"{self.label} has no clip")

    def layout(self, dims: int, page: int, keys: bool) -> SideLayout:
        """Return where a page record holds the codes of one side, which passes `why_no_record`."""
        raise NotImplementedError

    def why_no_record(self, dims: int, page: int, keys: bool = True) -> str | None:
        """Return why page records cannot hold one side, or None."""
        return f"{self.label} has no record"


@dataclass(frozen=True)
class Full(Quantizer):
    """Store values unchanged, in the model's own type."""

    method: ClassVar[str] = "full"
    file: ClassVar[str] = "raw"
    exact: ClassVar[bool] = True
    codes: ClassVar[bool] = False

    def describe(self, bits: str | None = None) -> str:
        return "full precision"

    @property
    def tensors(self) -> set[str]:
        """The tensor of pages: values [B, G, T, R], in the type of the model."""
        return {"values"}

    def bits_per_value(self, dims: int, page: int) -> float:
        return 16.0  # for a 16-bit model

    def why_no_record(self, dims: int, page: int, keys: bool = True) -> str | None:
        return "full-precision pages have no record"


@dataclass(frozen=True)
class Half(Quantizer):
    """Store numbers in float16, whatever the model's type."""

    method: ClassVar[str] = "half"
    file: ClassVar[str] = "raw"
    codes: ClassVar[bool] = False

    def describe(self, bits: str | None = None) -> str:
        return "float16"

    @property
    def tensors(self) -> set[str]:
        """The tensor of pages: values float16 [B, G, T, R]."""
        return {"values"}

    def bits_per_value(self, dims: int, page: int) -> float:
        return 16.0

    def layout(self, dims: int, page: int, keys: bool) -> SideLayout:
        return SideLayout("numbers", keys, dims, HALF, dims)

    def why_no_record(self, dims: int, page: int, keys: bool = True) -> str | None:
        return None


@dataclass(frozen=True)
class Affine(Quantizer):
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

    @property
    def code_bits(self) -> int:
        return self.bits

    @property
    def clips(self) -> bool:
        return self.axis == "token" and not self.shared

    def clipped(self, clip: float) -> Affine:
        return replace(self, clip=clip)

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

    def layout(self, dims: int, page: int, keys: bool) -> SideLayout:
        kind, header = "shared" if self.shared else self.axis, page if self.axis == "channel" else 0
        group = self.group_size(dims, page)
        return SideLayout(kind, keys, dims, self.bits, group, self.symmetric, header)

    def why_no_record(self, dims: int, page: int, keys: bool = True) -> str | None:
        group = self.group_size(dims, page)
        if self.axis == "channel":
            return (
                f"groups of {group} tokens are no multiple of {TOKENS}" if group % TOKENS else None
            )
        if group % BLOCK and group != dims:
            return f"groups of {group} are no multiple of {BLOCK}"
        return None


@dataclass(frozen=True)
class Codebook(Quantizer):
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

    @property
    def code_bits(self) -> int:
        return self.bits

    def layout(self, dims: int, page: int, keys: bool) -> SideLayout:
        return SideLayout("codebook", keys, dims, self.bits, dims)

    def why_no_record(self, dims: int, page: int, keys: bool = True) -> str | None:
        return "codes of 1 bit have no record" if self.bits == 1 else None


@dataclass(frozen=True)
class PolarTree(Quantizer):
    """PolarQuant of Han et al. (arXiv 2502.02617): one 16-bit radius and 15 angles for each 16 dims.

    Pairs of dims take 4 bits of angle, pairs of radii 2 bits at each of three levels: 3.875 bits per value.

    codebooks: 16, 4, 4 and 4 ascending angles for the four levels, from `codec.polar_tree.fit` ("offline");
        empty: the best for Gaussian vectors.
    online: fit codebooks to each page and store them with it.
    """

    method: ClassVar[str] = "polartree"
    file: ClassVar[str] = "polar_tree"

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

    def layout(self, dims: int, page: int, keys: bool) -> SideLayout:
        if self.online:
            return SideLayout("online tree", keys, dims, TREE_CODE, TREE, page=page)
        import numpy as np  # not at start-up

        from mlxkv.formats import levels

        books = self.codebooks or [levels.angles(i, b) for i, b in enumerate(TREE_BITS, 1)]
        words = np.concatenate(books).astype(np.float32).view(np.int32)
        return SideLayout("tree", keys, dims, TREE_CODE, TREE, books=tuple(int(n) for n in words))

    def why_no_record(self, dims: int, page: int, keys: bool = True) -> str | None:
        return None


@dataclass(frozen=True)
class Polar(Quantizer):
    """PolarQuant (Wu et al., arXiv 2502.00527): dims i and i + R/2, which RoPE rotates together, as polar
    coordinates. For keys after RoPE, without a transform.

    radius, angle: bits of each, 1 to 4. Each has a range per pair over the tokens of a page; a code
        decodes to the middle of its step.
    """

    method: ClassVar[str] = "polar"
    rope_pairs: ClassVar[bool] = True

    radius: int = 4
    angle: int = 4

    def __post_init__(self):
        for name in ("radius", "angle"):
            if (bits := getattr(self, name)) not in POLAR_BITS:
                choices = ", ".join(map(str, POLAR_BITS))
                raise UserError(f"[Polar] unknown {name} bits; got {bits}; choose from {choices}")

    @property
    def code_bits(self) -> int:
        """The bits of the wider of the two."""
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

    def bits_per_value(self, dims: int, page: int) -> float:
        words = -(-dims * self.pair_bits // 64)
        return 32 * words / dims + 16 * 2 / page

    def why_not(self, dims: int, page: int) -> str | None:
        if dims % 2:
            return f"polar takes pairs of dims; got {dims}"
        if page < LEAST_TILE:
            return f"a page of {page} tokens is no tile; it takes {LEAST_TILE} at least"
        return None

    def layout(self, dims: int, page: int, keys: bool) -> SideLayout:
        return SideLayout("pairs", keys, dims, self.code_bits, page, symmetric=False, page=page)

    def why_no_record(self, dims: int, page: int, keys: bool = True) -> str | None:
        if not keys:
            return "values as radius and angle have no record"
        if self.radius != self.angle or self.radius == 1:
            return f"no record for radius int{self.radius} and angle int{self.angle}"
        if dims % (2 * BLOCK) or dims > MAX_PAIR_DIMS:
            return f"pairs of {dims} dims are not read by single lanes from one table"
        return (
            f"a page of {page} tokens is no multiple of {PAIR_PAGE}" if page % PAIR_PAGE else None
        )


@dataclass(frozen=True)
class MixedBits(Quantizer):
    """Codes whose bits differ by block of 16 stored dims: `x ~ scale * (code - (2^b - 1) / 2)`, one 16-bit scale per
    token and no bias; cells are `scale / GAINS[b]` wide.

    Stored dims are the directions of balanced maps, those first in which an error costs most; a calibration gives each
    block its bits (`mlxkv.formats.calibration.mixed_bits`), the same for all kv heads of a layer, and scales
    directions so that one step serves all widths. Blocks of 0 bits are not stored.

    rate: bits per value, scales included, that keys and values of all layers have to share; a side whose other one has
        another rate has its own.
    widths: bits of each stored block, never rising; (): not allotted yet.
    """

    method: ClassVar[str] = "fill"
    file: ClassVar[str] = "mixed_bits"

    rate: float
    widths: tuple[int, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "widths", tuple(self.widths))
        if not RATES[0] <= self.rate <= RATES[1]:
            raise UserError(
                f"[MixedBits] bits a value must be {RATES[0]} to {RATES[1]}; got {self.rate}"
            )
        if not set(self.widths) <= set(WIDTHS) or list(self.widths) != sorted(self.widths)[::-1]:
            raise UserError(
                f"[MixedBits] widths must be of {', '.join(map(str, WIDTHS))} and never rise; got "
                f"{', '.join(map(str, self.widths))}"
            )

    def describe(self, bits: str | None = None) -> str:
        widths = "/".join(map(str, self.widths))
        said = (
            f"{widths} bits" if widths else f"{bits or f'{self.rate:g}'} bits a value in the mean,"
        )
        return f"{said} by blocks of {DIMS} directions, a scale per token"

    @property
    def tensors(self) -> set[str]:
        """The tensors of pages: codes [B, G, T, W] words, all blocks of a token in one stream; scale float16
        [B, G, T, 1]."""
        return {"codes", "scale"}

    @property
    def dims(self) -> int:
        """Stored dims R, once widths are allotted."""
        return DIMS * len(self.widths)

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(bits, dims) of each run of blocks of one width."""
        return tuple((b, DIMS * self.widths.count(b)) for b in dict.fromkeys(self.widths))

    @property
    def words(self) -> int:
        """32-bit words of a token's codes."""
        return -(-DIMS * sum(self.widths) // 32)

    def bits_per_value(self, dims: int, page: int) -> float:
        """Return the rate that was asked for, as long as no widths are allotted."""
        return (32 * self.words + 16) / dims if self.widths else self.rate

    def why_not(self, dims: int, page: int) -> str | None:
        if dims % DIMS:
            return f"blocks of {DIMS} directions do not divide {dims} dims"
        if self.widths and dims != self.dims:
            return f"widths of {self.dims} dims do not fit {dims}"
        return None

    @property
    def budget(self) -> float:
        return self.rate

    def stored_dims(self, head_dim: int) -> int:
        """Return stored dims R, or the head dim until a calibration has given the widths."""
        return self.dims or head_dim

    def kind(self, transform: str) -> str:
        return f"{transform} {','.join(map(str, self.widths))}"

    def layout(self, dims: int, page: int, keys: bool) -> SideLayout:
        return SideLayout("blocks", keys, dims, 0, dims, widths=self.widths)

    def why_no_record(self, dims: int, page: int, keys: bool = True) -> str | None:
        if not self.widths:
            return "a calibration has to give mixed bits their widths"
        too_many = len(self.widths) > MOST_BLOCKS
        return f"more than {DIMS * MOST_BLOCKS} dims with bits of their own" if too_many else None


# Every method, by its name in saved files.
METHODS: dict[str, type[Quantizer]] = {
    kind.method: kind for kind in (Full, Half, Affine, Codebook, PolarTree, Polar, MixedBits)
}
