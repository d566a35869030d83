"""Formats whose scales belong to a tile, the page of one kv head: KVarN and PolarQuant.

No framework is imported here. `R` stored dims per token, `page` tokens encoded together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from mlxkv.errors import UserError

DUAL_BITS = (2, 3, 4, 8)
POLAR_BITS = (1, 2, 3, 4)
LEAST_TILE = 32  # tokens: a standard deviation, or a range, of fewer says little


@dataclass(frozen=True)
class DualScale:
    """KVarN: `x ~ outer * (scale * code + bias)`, tokens and channels of a tile on scales of their own.

    bits: bits per code, one of 2, 3, 4, 8.
    axis: what shares a range of codes. "channel" (keys): scale and bias per channel, `outer` per
        token. "token" (values): scale and bias per token, `outer` per channel.
    unit_std: the tile is divided by its own standard deviation first, so that the floor of the
        published scales (.741) does not switch them off in tiles of small values.
    quantile: share of a row at either end that is clipped (KVARN_RTN_QUANTILE), below .5; 0: none.
    """

    bits: int
    axis: Literal["token", "channel"]
    unit_std: bool = False
    quantile: float = 0.0
    symmetric: ClassVar[bool] = False
    outer: ClassVar[bool] = True

    def __post_init__(self):
        if self.bits not in DUAL_BITS:
            choices = ", ".join(map(str, DUAL_BITS))
            raise UserError(f"[DualScale] unknown bits; got {self.bits}; choose from {choices}")
        if self.axis not in ("token", "channel"):
            raise UserError(
                f"[DualScale] unknown axis; got {self.axis!r}; choose from token, channel"
            )
        if not 0 <= self.quantile < 0.5:
            raise UserError(
                f"[DualScale] quantile must be at least 0 and below .5; got {self.quantile}"
            )

    @property
    def label(self) -> str:
        first = ", tiles of unit std" if self.unit_std else ""
        cut = f", {2 * self.quantile:.3g} clipped".replace(" 0.", " .") if self.quantile else ""
        return f"KVarN int{self.bits} per {self.axis}{first}{cut}"

    def group_size(self, dims: int, page: int) -> int:
        """Values per scale: a whole token, or a whole channel of a page."""
        return dims if self.axis == "token" else page

    def bits_per_value(self, dims: int, page: int) -> float:
        """Stored bits per value: codes in whole 32-bit words, three 16-bit numbers per token and
        channel of a tile, in all."""
        words = -(-dims * self.bits // 32)
        tokens, channels = (1, 2) if self.axis == "channel" else (2, 1)
        return 32 * words / dims + 16 * (tokens / dims + channels / page)

    def why_not(self, dims: int, page: int) -> str | None:
        """Why `dims` stored dims in pages of `page` tokens cannot be encoded, or None."""
        return _why_no_tile(page)


@dataclass(frozen=True)
class Polar:
    """PolarQuant (Wu et al.): dims i and i + R/2, which RoPE turns together, as radius and angle.

    radius, angle: bits of each, 1 to 4. Both have a range per pair over the tokens of a page, and
    codes stand for the middle of a step. For keys behind RoPE, without a transform.
    """

    radius: int = 4
    angle: int = 4
    axis: ClassVar[str] = "channel"
    symmetric: ClassVar[bool] = False
    outer: ClassVar[bool] = False

    def __post_init__(self):
        for name in ("radius", "angle"):
            if (bits := getattr(self, name)) not in POLAR_BITS:
                choices = ", ".join(map(str, POLAR_BITS))
                raise UserError(f"[Polar] unknown {name} bits; got {bits}; choose from {choices}")

    @property
    def bits(self) -> int:
        """The wider of the two."""
        return max(self.radius, self.angle)

    @property
    def pair_bits(self) -> int:
        """Bits of a code: the radius above the angle."""
        return self.radius + self.angle

    @property
    def label(self) -> str:
        return f"polar, radius int{self.radius} and angle int{self.angle} per pair of channels"

    def group_size(self, dims: int, page: int) -> int:
        """Values per range: those of a page."""
        return page

    def bits_per_value(self, dims: int, page: int) -> float:
        """Stored bits per value: codes in whole 32-bit words, four 16-bit numbers per pair and
        page."""
        words = -(-dims * self.pair_bits // 64)
        return 32 * words / dims + 16 * 2 / page

    def why_not(self, dims: int, page: int) -> str | None:
        """Why `dims` stored dims in pages of `page` tokens cannot be encoded, or None."""
        if dims % 2:
            return f"polar takes pairs of dims; got {dims}"
        return _why_no_tile(page)


def _why_no_tile(page: int) -> str | None:
    if page < LEAST_TILE:
        return f"a page of {page} tokens is no tile; it takes {LEAST_TILE} at least"
    return None
