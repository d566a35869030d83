"""Quantizers as frozen data: full precision, and affine codes. Letters as in `mlxkv.formats.config`."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import Literal

from mlxkv.errors import UserError

BITS = (2, 3, 4, 8)
MIN_GROUP = 16  # below this the scales outweigh the codes
HALF_MAX = 65504.0  # the largest float16


class Method:
    """A quantizer. A subclass has `label`, for reports, and `tensors`, the names of the tensors of pages."""

    label: str
    tensors: set[str]

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

    @property
    def label(self) -> str:
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

    @property
    def label(self) -> str:
        if self.shared:
            return f"int{self.bits} symmetric, a scale per page"
        shape = "symmetric" if self.symmetric else "min-max"
        clip = f", clip {self.clip:g}".replace(" 0.", " .") if self.clip < 1 else ""
        return f"int{self.bits} {shape}, group {self.group or 'all'} per {self.axis}{clip}"

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
