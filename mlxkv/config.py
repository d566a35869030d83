"""What a cache stores, as frozen data: sides, presets and the `--kv` grammar.

No framework is imported here: the MLX package, the torch track and `mlxkv fit` share this file.
Letters: `R` stored dims per token, `page` tokens encoded together.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from mlxkv.errors import UserError
from mlxkv.formats import Affine, Full
from mlxkv.formats_codebook import Codebook, PolarTree
from mlxkv.formats_lowrank import Half, LowRank
from mlxkv.formats_tile import DualScale, Polar

CALIBRATED, BALANCED, LEARNED = "oscar", "balanced", "learned"
PAIRED = (BALANCED, LEARNED)  # maps that are no rotations, in a calibration
PCA = "pca"  # fewer dims, of a calibration
SPREAD = "hadamard-srft"  # Hadamard, and srft for head dims that are no power of two
TRANSFORMS = ("none", "hadamard", "srft", SPREAD, "random", CALIBRATED, *PAIRED, PCA)


Quantizer = Full | Half | Affine | Codebook | PolarTree | DualScale | Polar


@dataclass(frozen=True)
class Side:
    """How keys, or values, are stored: a transform, then a quantizer.

    transform: "none", "hadamard" (sign-randomised, power-of-two head dims), "srft" (every even
        head dim), "hadamard-srft" (the first where it can be, else the second), "random" (a dense
        random rotation, every head dim), or per kv head from `mlxkv calibrate` "oscar" (a rotation),
        "balanced" (an invertible map), "pca" (fewer dims, as `low` says) and, with its --learn,
        "learned" (SRFT, then what Adam made of it).
    seed: seed of the random signs, or matrix, of the transform.
    own_clip: a calibrated side keeps its clip, whatever was searched for the model.
    """

    quantizer: Quantizer
    transform: str = "none"
    seed: int = 0
    own_clip: bool = False
    low: LowRank | None = None

    def __post_init__(self):
        if self.transform not in TRANSFORMS:
            choices = ", ".join(TRANSFORMS)
            raise UserError(
                f"[Side] unknown transform; got {self.transform!r}; choose from {choices}"
            )
        if (self.transform == PCA) != (self.low is not None):
            raise UserError(f'[Side] "{PCA}" and low go together; got {self.transform!r}')

    @property
    def calibrated(self) -> bool:
        """Whether its transform comes from a calibration of the model."""
        return self.transform in (CALIBRATED, *PAIRED, PCA)

    @property
    def kind(self) -> str:
        """Which transform of a calibration it takes: "pca 96" has its rank, "pca 0.75" its share (all
        of the dims until a calibration has said what an energy takes), mixed where it is."""
        if self.low is None:
            return self.transform
        size = self.low.rank or self.low.share or 1.0
        return f"{PCA} {size}{' mixed' if self.low.mixed else ''}"

    def dims(self, head_dim: int) -> int:
        """Stored dims R."""
        return head_dim if self.low is None else self.low.dims(head_dim)

    @property
    def searchable(self) -> bool:
        """Whether a calibration may say how it is clipped."""
        spec = self.quantizer
        affine = isinstance(spec, Affine) and spec.axis == "token"
        return self.calibrated and affine and not self.own_clip and self.low is None

    def format(self, dims: int, page: int) -> str:
        """What a searched clip belongs to: `Affine.format`, behind "balanced " or "learned " for such a
        side."""
        prefix = f"{self.transform} " if self.transform in PAIRED else ""
        return prefix + self.quantizer.format(dims, page)

    def clipped(self, clip: float) -> Side:
        return replace(self, quantizer=replace(self.quantizer, clip=clip))

    @property
    def label(self) -> str:
        name = self.low.label if self.low else self.transform
        prefix = "" if self.transform == "none" else f"{name} + "
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
        if (self.transform in ("srft", SPREAD) or self.calibrated) and head_dim % 2:
            return f"{self.transform} needs an even head dim, this one is {head_dim}"
        if isinstance(self.quantizer, Polar) and self.transform != "none":
            return f"polar takes the pairs of RoPE, which {self.transform} mixes"
        if self.low is not None and (reason := self.low.why_not(head_dim)):
            return reason
        return self.quantizer.why_not(self.dims(head_dim), page)

    def bits_per_value(self, head_dim: int, page: int) -> float:
        """Stored bits per value of a head, in pages."""
        stored = self.dims(head_dim)
        return self.quantizer.bits_per_value(stored, page) * stored / head_dim


@dataclass(frozen=True)
class CacheConfig:
    """A whole cache: keys, values and the full-precision windows.

    sink: first tokens kept in full precision. recent: last tokens kept in full precision (up to a
    page more). page: tokens encoded together.
    keep: share of the sealed tokens of a prompt that stay once it is read, by the votes of its last
    queries (SnapKV); whole_pages: by pages, for all kv heads alike, not by tokens for each.
    """

    keys: Side
    values: Side
    sink: int = 64
    recent: int = 64
    page: int = 64
    keep: float = 1.0
    whole_pages: bool = False

    def __post_init__(self):
        if self.page < 16 or self.page % 16:
            raise UserError(f"[CacheConfig] page must be a multiple of 16; got {self.page}")
        if self.sink < 0 or self.recent < 0:
            raise UserError(
                f"[CacheConfig] windows must be 0 or more; got {self.sink}, {self.recent}"
            )
        if not 0 < self.keep <= 1:
            raise UserError(f"[CacheConfig] keep must be above 0 and at most 1; got {self.keep}")

    @property
    def compresses(self) -> bool:
        full = (isinstance(side.quantizer, Full) for side in (self.keys, self.values))
        return self.keep < 1 or not all(full)

    @property
    def follows(self) -> bool:
        """Whether a side's basis follows the text."""
        return any(side.low is not None and side.low.follows for side in (self.keys, self.values))

    @property
    def listens(self) -> bool:
        """Whether caches have to hear queries."""
        return self.follows or self.keep < 1

    def dims(self, key_dim: int, value_dim: int) -> tuple[int, int]:
        """Stored dims R of keys and values."""
        return self.keys.dims(key_dim), self.values.dims(value_dim)

    @property
    def calibrated(self) -> bool:
        """Whether a side needs a calibration of the model."""
        return self.keys.calibrated or self.values.calibrated

    @property
    def balanced(self) -> bool:
        """Whether a side needs the balanced part of one."""
        return BALANCED in (self.keys.transform, self.values.transform)

    @property
    def low(self) -> bool:
        """Whether a side stores fewer dims."""
        return PCA in (self.keys.transform, self.values.transform)

    @property
    def learned(self) -> bool:
        """Whether a side needs learned transforms, which no calibration has unless asked for."""
        return LEARNED in (self.keys.transform, self.values.transform)

    @property
    def fitted(self) -> tuple[str, str]:
        """Which calibrated transforms a cache needs, for keys and values; a side that is not
        calibrated would have a rotation."""
        sides = (self.keys, self.values)
        return tuple(side.kind if side.calibrated else CALIBRATED for side in sides)

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
        keys = self.keys.bits_per_value(key_dim, self.page) * key_dim
        values = self.values.bits_per_value(value_dim, self.page) * value_dim
        return self.keep * (keys + values) / (key_dim + value_dim)

    def as_dict(self) -> dict:
        """Plain data, for headers of saved files; `from_dict` reads it back. Equal to what JSON makes
        of it."""
        data = json.loads(json.dumps(asdict(self)))
        for name in ("keys", "values"):
            data[name]["quantizer"]["method"] = type(getattr(self, name).quantizer).__name__.lower()
            if data[name]["low"] is None:  # as files were before there was any
                del data[name]["low"]
        if self.keep == 1:
            del data["keep"], data["whole_pages"]
        return data

    @staticmethod
    def from_dict(data: dict) -> CacheConfig:
        """The inverse of `as_dict`. Raises UserError on anything else."""
        methods = {
            **{"full": Full, "affine": Affine, "codebook": Codebook, "polartree": PolarTree},
            **{"dualscale": DualScale, "polar": Polar, "half": Half},
        }
        try:
            sides = {}
            for name in ("keys", "values"):
                side = dict(data[name])
                quantizer, low = dict(side.pop("quantizer")), side.pop("low", None)
                side["low"] = LowRank(**low) if low else None
                sides[name] = Side(methods[quantizer.pop("method")](**quantizer), **side)
            kept = {name: data[name] for name in ("keep", "whole_pages") if name in data}
            windows = {name: data[name] for name in ("sink", "recent", "page")}
            return CacheConfig(**sides, **windows, **kept)
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


def _turned(keys: Quantizer, values: Quantizer | None = None, how: str = "random") -> CacheConfig:
    return CacheConfig(Side(keys, how), Side(values or keys, how))


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


def low_rank(low: LowRank, keys: Quantizer, values: Quantizer, windows: int = 32) -> CacheConfig:
    """Both sides by the same `low`, their dims mixed for codes. windows: those of the OjaKV paper."""
    sides = (Side(q, PCA, low=replace(low, mixed=type(q) is not Half)) for q in (keys, values))
    return CacheConfig(*sides, sink=windows, recent=windows)


def _oja(share: float, quantizer: Quantizer | None = None) -> CacheConfig:
    return low_rank(LowRank(share, follows=True), quantizer or Half(), quantizer or Half())


CLIPPED = Side(Affine(2, 64, clip=0.92), "hadamard")

PRESETS: dict[str, CacheConfig] = {
    "fp16": CacheConfig(FULL, FULL),
    # The best measured of each width.
    "int8": _both(8, "none"),
    "int4": _both(4, "srft"),
    "int3": _balanced(3),
    "int2": _balanced(2, clip=0.96),
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
    # The best without calibration at these widths.
    "srft-int3+g64": _both(3, "srft"),
    "srft-int2+g32": _both(2, "srft", group=32),
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
    # A random rotation and the best codebook for it (TurboQuant); halves: outlier channels. A
    # residual stage is for products with queries, so values go without.
    "turbo-int4": _turned(Codebook(4)),
    "turbo-int3": _turned(Codebook(3)),
    "turbo-int2": _turned(Codebook(2)),
    "turbo-3.5": _turned(Codebook(3, outliers=True), how="none"),
    "turbo-2.5": _turned(Codebook(2, outliers=True), how="none"),
    "turbo-int4+qjl": _turned(Codebook(4, residual=True), Codebook(4)),
    "turbo-int3+qjl": _turned(Codebook(3, residual=True), Codebook(3)),
    # A random rotation, then radii and angles (PolarQuant of Han et al.).
    "polar-tree": _turned(PolarTree()),
    "polar-tree+online": _turned(PolarTree(online=True)),
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
    # Low rank: fixed, and following the text (OjaKV). `mlxkv.naming` reads other ranks and extras.
    "static-0.75": low_rank(LowRank(0.75), Half(), Half(), windows=0),
    "static-0.75+windows": low_rank(LowRank(0.75), Half(), Half()),
    "oja-0.8": _oja(0.8),
    "oja-0.75": _oja(0.75),
    "oja-0.6": _oja(0.6),
    "oja-0.75+int8": _oja(0.75, Affine(8, 64)),
    "oja-0.75+int4": _oja(0.75, Affine(4, 64)),
}


def parse_kv(text: str) -> CacheConfig:
    """The configuration named by `--kv TEXT` (`mlxkv.naming`). Raises UserError."""
    from mlxkv.naming import parse  # reads PRESETS

    return parse(text)
