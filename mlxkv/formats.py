"""Quantizers as frozen data: full precision, and affine codes.

Letters as in `mlxkv.config`; no framework is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import ClassVar, Literal

from mlxkv.errors import UserError

BITS = (2, 3, 4, 8)
MIN_GROUP = 16  # below this the scales outweigh the codes


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
