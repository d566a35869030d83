"""What a cache stores, as frozen data: a transform and a quantizer for each side, and the windows.

Letters: `R` stored dims per token, `page` tokens encoded together.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace

from mlxkv.errors import UserError
from mlxkv.formats.lowrank import LowRank
from mlxkv.formats.quantizers import METHODS, Affine, Full, Quantizer

CALIBRATED, BALANCED, LEARNED = "oscar", "balanced", "learned"
SHARED = "oscar-layer"  # one rotation for all kv heads of a layer
SCALED = "srft-scaled"  # SRFT, then a calibrated scale per channel
PAIRED = (BALANCED, LEARNED)  # calibrated maps that are not rotations
MIXED_BITS = "fill"  # balanced directions, scaled by the bits of their blocks
# The same of keys without their mean.
CENTRED = {f"{name}-centred": name for name in (CALIBRATED, BALANCED, MIXED_BITS)}
PCA = "pca"  # fewer dims, from a calibration
FROM_CALIBRATIONS = (CALIBRATED, SHARED, *PAIRED, *CENTRED, SCALED, PCA, MIXED_BITS)
TRANSFORMS = ("none", "hadamard", "srft", "random", *FROM_CALIBRATIONS)


@dataclass(frozen=True)
class Side:
    """How keys, or values, are stored: a transform, then a quantizer.

    transform: "none", "hadamard" (sign-randomised, power-of-two head dims),
        "srft" (every even head dim), "random" (a dense random
        rotation, every head dim); or, per kv head from `mlxkv calibrate`, "oscar" (a rotation),
        "balanced" (an invertible map), "pca" (fewer dims, by `low`), "fill" (fewer dims, with bits of their own, by
        `MixedBits`) and, with --learn, "learned" (SRFT, then a map trained with Adam); "oscar-centred",
        "balanced-centred" and "fill-centred" (of keys alone) take a calibrated mean from every key first; or, per
        layer, "oscar-layer" (a rotation) and "srft-scaled" (SRFT, then a scale per channel).
    seed: seed of the transform's random signs or matrix; 0 for "srft-scaled", whose scales belong to it.
    own_clip: keep this clip, even where one was searched for the model.
    low: the rank, for "pca" alone.
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
        if self.mixed_bits and self.quantizer.budget is None:
            raise UserError(
                f'[Side] "{self.transform}" is for MixedBits; got {self.quantizer.label}'
            )
        if self.transform == SCALED and self.seed:
            raise UserError(f"[Side] scales are calibrated for seed 0; got {self.seed}")

    @property
    def calibrated(self) -> bool:
        """Return whether its transform comes from a calibration of the model."""
        return self.transform in FROM_CALIBRATIONS

    @property
    def mixed_bits(self) -> bool:
        """Return whether a calibration chooses its stored dims and their bits."""
        return CENTRED.get(self.transform, self.transform) == MIXED_BITS

    @property
    def cut(self) -> bool:
        """Return whether it may store fewer dims than a head has."""
        return self.low is not None or self.mixed_bits

    @property
    def centred(self) -> bool:
        """Return whether a calibrated mean is taken from what is stored."""
        return self.transform in CENTRED

    @property
    def kind(self) -> str:
        """Name of the calibrated transform: the transform, or for low rank "pca 96" (rank), "pca 0.75"
        (share), then " mixed" where it is; for `MixedBits` with its widths, "fill 4,4,2"."""
        if self.mixed_bits:
            return self.quantizer.kind(self.transform)
        if self.low is None:
            return self.transform
        size = self.low.rank or self.low.share
        return f"{PCA} {size}{' mixed' if self.low.mixed else ''}"

    @property
    def is_online(self) -> bool:
        """Return whether its basis follows the text."""
        return self.low is not None and self.low.follows

    def dims(self, head_dim: int) -> int:
        """Return stored dims R; the head dim for `MixedBits` that a calibration has not given its widths."""
        if self.mixed_bits:
            return self.quantizer.stored_dims(head_dim)
        return head_dim if self.low is None else self.low.dims(head_dim)

    @property
    def searchable(self) -> bool:
        """Return whether a calibration may search the clip."""
        return self.calibrated and self.quantizer.clips and not self.own_clip and self.low is None

    def format(self, dims: int, page: int) -> str:
        """Return the key of a searched clip: `Quantizer.format`, after "balanced " and the like for all but
        rotations per kv head. Raises TypeError unless `searchable`."""
        prefix = "" if self.transform == CALIBRATED else f"{self.transform} "
        return prefix + self.quantizer.format(dims, page)

    def clipped(self, clip: float) -> Side:
        return replace(self, quantizer=self.quantizer.clipped(clip))

    @property
    def label(self) -> str:
        return self.describe()

    def describe(self, bits: str | None = None) -> str:
        """Return its label; bits: in place of the quantizer's own."""
        name = self.low.label if self.low else self.transform
        prefix = "" if self.transform == "none" else f"{name} + "
        return prefix + self.quantizer.describe(bits)

    def why_not(self, head_dim: int, page: int) -> str | None:
        """Return why vectors of `head_dim` cannot be stored this way, or None."""
        if self.transform == "hadamard" and head_dim & (head_dim - 1):
            return (
                f"hadamard needs a power-of-two head dim; got {head_dim} (srft takes any even one)"
            )
        if (self.transform == "srft" or self.calibrated) and head_dim % 2:
            return f"{self.transform} needs an even head dim, this one is {head_dim}"
        if self.quantizer.rope_pairs and self.transform != "none":
            return f"polar takes the pairs of RoPE, which {self.transform} mixes"
        if self.low is not None and (reason := self.low.why_not(head_dim)):
            return reason
        if self.dims(head_dim) > head_dim:
            return f"{self.dims(head_dim)} directions are more than the {head_dim} dims of a head"
        return self.quantizer.why_not(self.dims(head_dim), page)

    def bits_per_value(self, head_dim: int, page: int) -> float:
        """Return stored bits per value of a head, in pages."""
        stored = self.dims(head_dim)
        if not head_dim:  # such as latents without rotary keys
            return 0.0
        return self.quantizer.bits_per_value(stored, page) * stored / head_dim


ROTARY_BITS = 8
ROTARY = Side(Affine(ROTARY_BITS, 0, symmetric=True))  # rotary keys beside latents


@dataclass(frozen=True)
class CacheConfig:
    """Configure a whole cache: keys, values and the full-precision windows.

    sink: first tokens, kept in full precision.
    recent: last tokens, kept in full precision (up to a page more).
    page: tokens encoded together.
    keep: share of a prompt's quantized tokens that stay once the prompt is read, by the votes of its last
        queries (SnapKV).
    whole_pages: select pages, for all kv heads alike, in place of tokens for each head.
    rotary: bits of the rotary keys beside latents (MLA) in pages: 16, as the model makes them, or 8. Other
        models have none; `of_latents` makes it part of what is compared.
    name: by which `--kv` asked for it, for reports; not saved and not compared.
    """

    keys: Side
    values: Side
    sink: int = 64
    recent: int = 64
    page: int = 64
    keep: float = 1.0
    whole_pages: bool = False
    rotary: int = field(default=16, compare=False)
    name: str = field(default="", compare=False, repr=False)

    def __post_init__(self):
        if self.page < 16 or self.page % 16:
            raise UserError(f"[CacheConfig] page must be a multiple of 16; got {self.page}")
        if self.sink < 0 or self.recent < 0:
            raise UserError(
                f"[CacheConfig] windows must be 0 or more; got {self.sink}, {self.recent}"
            )
        if self.values.centred:
            raise UserError(
                f"[CacheConfig] only keys can be stored without their mean; got values {self.values.transform}; "
                f"choose {CENTRED[self.values.transform]}"
            )
        if self.keys.centred and self.needs_queries:
            raise UserError(
                "[CacheConfig] keys without their mean cannot be selected, and no basis follows them; got "
                f"{self.keys.transform}; choose keys of the transform {CENTRED[self.keys.transform]}, or a preset "
                "such as int2"
            )
        if self.rotary not in (8, 16):
            raise UserError(f"[CacheConfig] rotary must be 8 or 16 bits; got {self.rotary}")
        if not 0 < self.keep <= 1:
            raise UserError(f"[CacheConfig] keep must be above 0 and at most 1; got {self.keep}")

    @property
    def label(self) -> str:
        """The name in reports, or the labels of both sides."""
        return self.name or f"{self.keys.label} / {self.values.label}"

    @property
    def compresses(self) -> bool:
        return self.keep < 1 or not (self.keys.quantizer.exact and self.values.quantizer.exact)

    @property
    def is_online(self) -> bool:
        """Return whether a side's basis follows the text."""
        return self.online is not None

    @property
    def online(self) -> LowRank | None:
        """The `low` of the side that follows the text, keys first, or None."""
        return next((side.low for side in (self.keys, self.values) if side.is_online), None)

    @property
    def pinned(self) -> int:
        """Last tokens of the first prompt that stay exact for good."""
        return self.recent if self.online is not None and self.online.pinned else 0

    @property
    def needs_queries(self) -> bool:
        """Return whether caches need to see queries."""
        return self.is_online or self.keep < 1

    def dims(self, key_dim: int, value_dim: int) -> tuple[int, int]:
        """Return stored dims R of keys and values."""
        return self.keys.dims(key_dim), self.values.dims(value_dim)

    @property
    def calibrated(self) -> bool:
        """Return whether a side needs a calibration of the model."""
        return self.keys.calibrated or self.values.calibrated

    @property
    def centred(self) -> bool:
        """Return whether keys are stored without their mean."""
        return self.keys.centred

    @property
    def mixed_bits(self) -> bool:
        """Return whether a calibration gives a side mixed bits."""
        return self.keys.mixed_bits or self.values.mixed_bits

    @property
    def fitted(self) -> tuple[str, str]:
        """`Side.kind` of keys and values; "oscar" stands for a side that is not calibrated."""
        keys, values = self.keys, self.values
        return (
            keys.kind if keys.calibrated else CALIBRATED,
            values.kind if values.calibrated else CALIBRATED,
        )

    @property
    def folded(self) -> CacheConfig:
        """The config without the value transform, for a model whose weights already apply it."""
        return replace(self, values=replace(self.values, transform="none"))

    @property
    def of_latents(self) -> CacheConfig:
        """The config of a cache of latents (MLA), one record a token: stored as keys are, which are the sensitive
        half; its other part, the rotary keys, stays exact, or is stored with 8 bits and a scale per token."""
        return replace(self, values=Side(Full()) if self.rotary == 16 else ROTARY)

    @property
    def why_no_latents(self) -> str | None:
        """Return why latents cannot be stored this way, whatever their dims, or None."""
        side = self.keys
        if self.keep < 1:
            return "tokens of latents are not selected by their attention"
        if side.centred:
            return "a latent is read as a value, too, so no mean can be taken from it"
        if side.low is not None:
            return "a latent is of low rank already"
        if side.quantizer.exact:
            return "latents are stored as keys, which this preset keeps in full precision"
        if side.quantizer.rope_pairs:
            return "polar takes the pairs of RoPE, and latents have none"
        return None

    def recent_capacity(self, sink_is_out: bool) -> int:
        """Tokens that the recent window may hold; at first the sink is part of it."""
        return self.recent + self.page + (0 if sink_is_out else self.sink)

    def pages_over(self, tokens: int) -> int:
        """Pages to quantize of so many recent tokens, once the sink is out."""
        return -(-(tokens - self.recent_capacity(True)) // self.page)

    @property
    def window(self) -> int:
        """Tokens that a cache holds before it quantizes a page."""
        return self.sink + self.recent + self.page

    def why_not(self, key_dim: int, value_dim: int) -> str | None:
        """Return why heads of these dims cannot be stored, or None."""
        for name, side, dim in (("keys", self.keys, key_dim), ("values", self.values, value_dim)):
            if reason := side.why_not(dim, self.page):
                return f"{name}: {reason}"
        return None

    def bits_per_value(self, key_dim: int, value_dim: int) -> float:
        """Return stored bits per value in pages, without the windows."""
        keys = self.keys.bits_per_value(key_dim, self.page) * key_dim
        values = self.values.bits_per_value(value_dim, self.page) * value_dim
        return self.keep * (keys + values) / (key_dim + value_dim)

    def basis_bytes(self, heads: int, key_dim: int, value_dim: int) -> int:
        """Return the most bytes that one sequence's bases [G, D, R] in float32 take, one per run of pages,
        in a cache that follows the text; fixed bases belong to the model."""
        sides = ((self.keys, key_dim), (self.values, value_dim))
        values = sum(heads * dim * side.dims(dim) for side, dim in sides if side.is_online)
        return 4 * values * self.online.runs if self.online else 0

    def as_dict(self) -> dict:
        """Return plain data for headers of saved files, equal to itself after a round trip through JSON."""
        data = json.loads(json.dumps(asdict(self), default=repr))  # functions of a caller's own
        for name in ("keys", "values"):
            data[name]["quantizer"]["method"] = getattr(self, name).quantizer.method
        if self.values != ROTARY:  # no latents: there are no rotary keys apart
            data["rotary"] = 16
        del data["name"]
        return data

    @staticmethod
    def from_dict(data: dict) -> CacheConfig:
        """Read what `as_dict` returns. Raises UserError on anything else."""
        try:
            sides = {}
            for name in ("keys", "values"):
                side = dict(data[name])
                quantizer, low = dict(side.pop("quantizer")), side.pop("low", None)
                side["low"] = LowRank(**low) if low else None
                sides[name] = Side(METHODS[quantizer.pop("method")](**quantizer), **side)
            return replace(CacheConfig(**data | sides), name="")
        except UserError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise UserError(
                f"[CacheConfig] not a cache configuration this version reads ({error})"
            ) from None
