"""What a cache stores, as frozen data: sides, presets and the `--kv` grammar.

No framework is imported here: the MLX package, the torch track and `mlxkv fit` share this file.
Letters: `R` stored dims per token, `page` tokens encoded together.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import floor
from typing import ClassVar, Literal

from mlxkv.errors import UserError
from mlxkv.formats_tile import DualScale, Polar

BITS = (2, 3, 4, 8)
MIN_GROUP = 16  # below this the scales outweigh the codes
CALIBRATED = "oscar"
SPREAD = "hadamard-srft"  # Hadamard, and srft for head dims that are no power of two
TRANSFORMS = ("none", "hadamard", "srft", SPREAD, CALIBRATED)


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
    outer: ClassVar[bool] = False  # no further scale, as KVarN has one

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


Quantizer = Full | Affine | DualScale | Polar


@dataclass(frozen=True)
class Side:
    """How keys, or values, are stored: a transform, then a quantizer.

    transform: "none", "hadamard" (sign-randomised, power-of-two head dims), "srft" (every even
        head dim), "hadamard-srft" (the first where it can be, else the second) or "oscar"
        (calibrated: a rotation per kv head from `mlxkv calibrate`).
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
        return self.transform == CALIBRATED

    @property
    def searchable(self) -> bool:
        """Whether a calibration may say how it is clipped."""
        spec = self.quantizer
        affine = isinstance(spec, Affine) and spec.axis == "token"
        return self.calibrated and affine and not self.own_clip

    def clipped(self, clip: float) -> Side:
        return replace(self, quantizer=replace(self.quantizer, clip=clip))

    @property
    def label(self) -> str:
        prefix = "" if self.transform == "none" else f"{self.transform} + "
        return prefix + self.quantizer.label

    def note(self, head_dim: int) -> str:
        """What a report adds to the preset's name for heads of this dim: which transform stands in."""
        stands_in = self.transform == SPREAD and head_dim & (head_dim - 1)
        return f" (srft: {head_dim} dims have no Hadamard)" if stands_in else ""

    def why_not(self, head_dim: int, page: int) -> str | None:
        """The reason why vectors of `head_dim` cannot be stored this way, or None."""
        if self.transform == "hadamard" and head_dim & (head_dim - 1):
            return (
                f"hadamard needs a power-of-two head dim; got {head_dim} (srft takes any even one)"
            )
        if self.transform in ("srft", SPREAD, CALIBRATED) and head_dim % 2:
            return f"{self.transform} needs an even head dim, this one is {head_dim}"
        if isinstance(self.quantizer, Polar) and self.transform != "none":
            return f"polar takes the pairs of RoPE, which {self.transform} mixes"
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
        methods = {"full": Full, "affine": Affine, "dualscale": DualScale, "polar": Polar}
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


def _kivi(bits: int) -> CacheConfig:
    """Keys per channel, values per token, groups of 32, and the windows of the paper."""
    keys, values = Side(Affine(bits, 32, axis="channel")), Side(Affine(bits, 32))
    return CacheConfig(keys, values, sink=0, recent=128)


def _kvarn(keys: int, values: int, unit_std: bool = False) -> CacheConfig:
    sides = (
        Side(DualScale(bits, axis, unit_std), SPREAD)
        for bits, axis in ((keys, "channel"), (values, "token"))
    )
    return CacheConfig(*sides, page=128)


def _polar(bits: int, group: int) -> CacheConfig:
    """Radius and angle of keys at `bits` each; values per token, as KIVI has them."""
    sides = Side(Polar(bits, bits)), Side(Affine(bits, group))
    return CacheConfig(*sides, sink=0, recent=128, page=128)


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
    # A Hadamard rotation and a clip: what OSCAR is without its calibration.
    "hadamard-int2+clip": CacheConfig(CLIPPED, CLIPPED),
    # KIVI: keys per channel.
    "kivi-int4": _kivi(4),
    "kivi-int2": _kivi(2),
    # KVarN as published; extra: tiles divided by their standard deviation first.
    "kvarn-int4": _kvarn(4, 4),
    "kvarn-int3": _kvarn(3, 3),
    "kvarn-int2": _kvarn(2, 2),
    "kvarn-k4v2": _kvarn(4, 2),
    "kvarn-int4+fixed": _kvarn(4, 4, unit_std=True),
    "kvarn-int3+fixed": _kvarn(3, 3, unit_std=True),
    "kvarn-int2+fixed": _kvarn(2, 2, unit_std=True),
    # PolarQuant (Wu et al.): radius and angle of pairs of key channels.
    "polar": _polar(4, 128),
    "polar-int3": _polar(3, 64),
    "polar-int2": _polar(2, 32),
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
