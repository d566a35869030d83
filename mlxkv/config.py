"""What a cache stores, as frozen data: sides, presets and the `--kv` grammar.

No framework is imported here: the MLX package, the torch track and `mlxkv fit` share this file.
Letters: `R` stored dims per token, `page` tokens encoded together.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import floor
from typing import Literal

from mlxkv.errors import UserError

BITS = (2, 3, 4, 8)
MIN_GROUP = 16  # below this the scales outweigh the codes
CALIBRATED, BALANCED, LEARNED = "oscar", "balanced", "learned"
PAIRED = (BALANCED, LEARNED)  # maps that are no rotations, in a calibration
TRANSFORMS = ("none", "hadamard", "srft", CALIBRATED, *PAIRED)


@dataclass(frozen=True)
class Full:
    """Values kept as they come (16 bits in a 16-bit model)."""

    @property
    def label(self) -> str:
        return "full precision"

    def bits_per_value(self, dims: int, page: int) -> float:
        """Stored bits per value at 16 bits a number."""
        return 16.0

    def why_not(self, dims: int, page: int) -> str | None:
        """Why `dims` stored dims in pages of `page` tokens cannot be encoded, or None."""
        return None


@dataclass(frozen=True)
class Affine:
    """Uniform codes: `x ~ scale * code + bias`, one 16-bit scale (and bias) per group.

    bits: bits per code, one of 2, 3, 4, 8.
    group: values that share a scale, 0 for all. Along the stored dims for axis "token", where the
        last group may be short (80 dims: 64 + 16); along the tokens of a page for axis "channel".
    symmetric: abs-max around zero, codes -(2^(b-1)-1) .. 2^(b-1)-1 (SRFT paper, section 3.2); no
        bias is stored. Otherwise min-max with a stored bias.
    clip: share of the stored dims of a token, by absolute value, that are not clipped (OSCAR: keys
        .96, values .92); 1: none. Larger values become the smallest of them. Axis "token" only.
    """

    bits: int
    group: int = 64
    symmetric: bool = False
    axis: Literal["token", "channel"] = "token"
    clip: float = 1.0

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

    @property
    def label(self) -> str:
        shape = "symmetric" if self.symmetric else "min-max"
        clip = f", clip {self.clip:g}".replace(" 0.", " .") if self.clip < 1 else ""
        return f"int{self.bits} {shape}, group {self.group or 'all'} per {self.axis}{clip}"

    def format(self, dims: int, page: int) -> str:
        """What a searched clip belongs to: "int2 g64" also for group 128 of 64 dims."""
        size = f"int{self.bits} g{self.group_size(dims, page)}"
        return size + (" symmetric" if self.symmetric else "")

    def clip_rank(self, dims: int) -> int:
        """Which of the absolute values of a token is the limit, counted from the largest: 1 is the
        largest itself, which clips nothing."""
        return dims - min(floor(self.clip * dims + 1e-9), dims - 1)

    def group_size(self, dims: int, page: int) -> int:
        """Values per scale of `dims` stored dims (or of a page of `page` tokens)."""
        whole = dims if self.axis == "token" else page
        return min(self.group or whole, whole)

    def bits_per_value(self, dims: int, page: int) -> float:
        """Stored bits per value: codes in whole 32-bit words, 16-bit scales and biases."""
        words = -(-dims * self.bits // 32)
        numbers = 1 if self.symmetric else 2
        size = self.group_size(dims, page)
        scales = -(-dims // size) / dims if self.axis == "token" else 1 / size
        return 32 * words / dims + 16 * numbers * scales

    def why_not(self, dims: int, page: int) -> str | None:
        """Why `dims` stored dims in pages of `page` tokens cannot be encoded, or None."""
        if self.axis == "channel" and page % self.group_size(dims, page):
            return f"a page of {page} tokens is no multiple of the group {self.group}"
        return None


Quantizer = Full | Affine


@dataclass(frozen=True)
class Side:
    """How keys, or values, are stored: a transform, then a quantizer.

    transform: "none", "hadamard" (sign-randomised, power-of-two head dims), "srft" (every even
        head dim), or per kv head from `mlxkv calibrate` "oscar" (a rotation), "balanced" (an
        invertible map) and, with its --learn, "learned" (SRFT, then what Adam made of it).
    seed: seed of the random signs of the transform.
    own_clip: a calibrated side keeps its clip, whatever was searched for the model.
    """

    quantizer: Quantizer
    transform: str = "none"
    seed: int = 0
    own_clip: bool = False

    def __post_init__(self):
        if self.transform not in TRANSFORMS:
            choices = ", ".join(TRANSFORMS)
            raise UserError(
                f"[Side] unknown transform; got {self.transform!r}; choose from {choices}"
            )

    @property
    def calibrated(self) -> bool:
        """Whether its transform comes from a calibration of the model."""
        return self.transform in (CALIBRATED, *PAIRED)

    @property
    def searchable(self) -> bool:
        """Whether a calibration may say how it is clipped."""
        spec = self.quantizer
        affine = isinstance(spec, Affine) and spec.axis == "token"
        return self.calibrated and affine and not self.own_clip

    def format(self, dims: int, page: int) -> str:
        """What a searched clip belongs to: `Affine.format`, behind "balanced " or "learned " for such a
        side."""
        prefix = f"{self.transform} " if self.transform in PAIRED else ""
        return prefix + self.quantizer.format(dims, page)

    def clipped(self, clip: float) -> Side:
        return replace(self, quantizer=replace(self.quantizer, clip=clip))

    @property
    def label(self) -> str:
        prefix = "" if self.transform == "none" else f"{self.transform} + "
        return prefix + self.quantizer.label

    def why_not(self, head_dim: int, page: int) -> str | None:
        """The reason why vectors of `head_dim` cannot be stored this way, or None."""
        if self.transform == "hadamard" and head_dim & (head_dim - 1):
            return (
                f"hadamard needs a power-of-two head dim; got {head_dim} (srft takes any even one)"
            )
        if (self.transform == "srft" or self.calibrated) and head_dim % 2:
            return f"{self.transform} needs an even head dim, this one is {head_dim}"
        return self.quantizer.why_not(head_dim, page)


@dataclass(frozen=True)
class CacheConfig:
    """A whole cache: keys, values and the full-precision windows.

    sink: first tokens kept in full precision. recent: last tokens kept in full precision (up to a
    page more). page: tokens encoded together.
    """

    keys: Side
    values: Side
    sink: int = 64
    recent: int = 64
    page: int = 64

    def __post_init__(self):
        if self.page < 16 or self.page % 16:
            raise UserError(f"[CacheConfig] page must be a multiple of 16; got {self.page}")
        if self.sink < 0 or self.recent < 0:
            raise UserError(
                f"[CacheConfig] windows must be 0 or more; got {self.sink}, {self.recent}"
            )

    @property
    def compresses(self) -> bool:
        return any(not isinstance(side.quantizer, Full) for side in (self.keys, self.values))

    @property
    def calibrated(self) -> bool:
        """Whether a side needs a calibration of the model."""
        return self.keys.calibrated or self.values.calibrated

    @property
    def balanced(self) -> bool:
        """Whether a side needs the balanced part of one."""
        return BALANCED in (self.keys.transform, self.values.transform)

    @property
    def learned(self) -> bool:
        """Whether a side needs learned transforms, which no calibration has unless asked for."""
        return LEARNED in (self.keys.transform, self.values.transform)

    @property
    def fitted(self) -> tuple[str, str]:
        """Which calibrated transforms a cache needs, for keys and values; a side that is not
        calibrated would have a rotation."""
        sides = (self.keys, self.values)
        return tuple(side.transform if side.calibrated else CALIBRATED for side in sides)

    @property
    def folded(self) -> CacheConfig:
        """The same for a model whose weights turn values: they come in the stored domain."""
        return replace(self, values=replace(self.values, transform="none"))

    @property
    def window(self) -> int:
        """Tokens that a cache holds before it compresses any."""
        return self.sink + self.recent + self.page

    def why_not(self, key_dim: int, value_dim: int) -> str | None:
        """The reason why heads of these dims cannot be stored, or None."""
        for name, side, dim in (("keys", self.keys, key_dim), ("values", self.values, value_dim)):
            if reason := side.why_not(dim, self.page):
                return f"{name}: {reason}"
        return None

    def bits_per_value(self, key_dim: int, value_dim: int) -> float:
        """Stored bits per value inside the pages, windows left out."""
        keys = self.keys.quantizer.bits_per_value(key_dim, self.page) * key_dim
        values = self.values.quantizer.bits_per_value(value_dim, self.page) * value_dim
        return (keys + values) / (key_dim + value_dim)

    def as_dict(self) -> dict:
        """Plain data, for headers of saved files; `from_dict` reads it back."""
        data = asdict(self)
        for name in ("keys", "values"):
            data[name]["quantizer"]["method"] = type(getattr(self, name).quantizer).__name__.lower()
        return data

    @staticmethod
    def from_dict(data: dict) -> CacheConfig:
        """The inverse of `as_dict`. Raises UserError on anything else."""
        methods = {"full": Full, "affine": Affine}
        try:
            sides = {}
            for name in ("keys", "values"):
                side = dict(data[name])
                quantizer = dict(side.pop("quantizer"))
                sides[name] = Side(methods[quantizer.pop("method")](**quantizer), **side)
            return CacheConfig(**sides, sink=data["sink"], recent=data["recent"], page=data["page"])
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"[CacheConfig] not a cache configuration this version reads ({error})"
            ) from None


FULL = Side(Full())


def _both(bits: int, transform: str, group: int = 64, symmetric: bool = False) -> CacheConfig:
    side = Side(Affine(bits, group, symmetric), transform)
    return CacheConfig(side, side)


def _oscar(
    bits: int, group: int = 128, keys: float = 1.0, values: float = 1.0, own: bool = False
) -> CacheConfig:
    """The windows of the OSCAR paper. keys, values: clips, for models without searched ones, or for
    all (own)."""
    sides = (
        Side(Affine(bits, group, clip=clip), CALIBRATED, own_clip=own) for clip in (keys, values)
    )
    return CacheConfig(*sides, sink=64, recent=256)


def _balanced(bits: int, group: int = 128, clip: float = 1.0) -> CacheConfig:
    """clip: for models without searched ones."""
    side = Side(Affine(bits, group, clip=clip), BALANCED)
    return CacheConfig(side, side, sink=64, recent=64)


CLIPPED = Side(Affine(2, 64, clip=0.92), "hadamard")

PRESETS: dict[str, CacheConfig] = {
    "fp16": CacheConfig(FULL, FULL),
    # The best measured of each width.
    "int8": _both(8, "none"),
    "int4": _both(4, "srft"),
    "int3": _both(3, "srft"),
    "int2": _both(2, "srft", group=32),
    # Plain min-max, the way mlx-lm's --kv-bits stores (group 64), no transform.
    "naive-int8": _both(8, "none"),
    "naive-int4": _both(4, "none"),
    "naive-int3": _both(3, "none"),
    "naive-int2": _both(2, "none"),
    # Sign-randomised Hadamard (QuaRot).
    "hadamard-int8": _both(8, "hadamard"),
    "hadamard-int4": _both(4, "hadamard"),
    "hadamard-int3": _both(3, "hadamard"),
    "hadamard-int2": _both(2, "hadamard"),
    # Sign-randomised FFT, abs-max per group of 32 (SRFT paper, section 7.1).
    "srft-int8": _both(8, "srft", group=32, symmetric=True),
    "srft-int4": _both(4, "srft", group=32, symmetric=True),
    "srft-int3": _both(3, "srft", group=32, symmetric=True),
    "srft-int2": _both(2, "srft", group=32, symmetric=True),
    # Calibrated rotations and the windows of the OSCAR paper; extras: smaller groups.
    "oscar-int4": _oscar(4),
    "oscar-int3": _oscar(3),
    "oscar-int2": _oscar(2, keys=0.96, values=0.92),
    "oscar-int2+g64": _oscar(2, 64, keys=0.96, values=0.92),
    "oscar-int2+g32": _oscar(2, 32, keys=0.96, values=0.92),
    "oscar-int2+clip92": _oscar(2, keys=0.92, values=0.92, own=True),
    # Calibrated invertible maps under which stored keys (values) and what reads them weigh alike.
    "balanced-int4": _balanced(4),
    "balanced-int3": _balanced(3),
    "balanced-int2": _balanced(2, clip=0.96),
    "balanced-int2+g64": _balanced(2, 64, clip=0.96),
    "balanced-int2+g32": _balanced(2, 32, clip=0.96),
    # Learned scales and rotations (SRFT paper, section 5), from mlxkv calibrate --learn.
    "learned-int4": _both(4, LEARNED),
    "learned-int3": _both(3, LEARNED),
    "learned-int2": _both(2, LEARNED),
    # A Hadamard rotation and a clip: what OSCAR is without its calibration.
    "hadamard-int2+clip": CacheConfig(CLIPPED, CLIPPED),
}


def parse_kv(text: str) -> CacheConfig:
    """The configuration named by `--kv TEXT`: a preset, or `KEYS/VALUES` (`int8/int4`).

    A pair takes the keys and windows of the first preset and the values of the second.
    """
    names = text.strip().split("/")
    unknown = next((name for name in names if name not in PRESETS), None)
    if unknown is not None or len(names) > 2:
        choices = ", ".join(PRESETS)
        raise UserError(
            f"[--kv] unknown preset; got {text!r}; choose from {choices}, "
            "or KEYS/VALUES such as int8/int4"
        )
    keys, values = PRESETS[names[0]], PRESETS[names[-1]]
    windows = keys if keys.compresses else values
    return CacheConfig(keys.keys, values.values, windows.sink, windows.recent, windows.page)
