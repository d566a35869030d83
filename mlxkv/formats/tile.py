"""Quantizers as frozen data, with scales per tile (the page of one kv head): KVarN, PolarQuant and Kitty.

Letters: `R` stored dims per token, `page` tokens encoded together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from mlxkv.errors import UserError

DUAL_BITS = (2, 3, 4, 8)
POLAR_BITS = (1, 2, 3, 4)
POLAR_NUMBERS = ("radius_step", "radius_low", "angle_step", "angle_low")
LEAST_TILE = 32  # tokens: the standard deviation or range of fewer says little
# How KVarN finds its scales (spec: `mlxkv.spec.dual_scale`).
ITERATIONS = 16
STD_RANGE = (1e-3, 1e3)  # what one step may divide by
LOG_RANGE = (-0.3, 10.0)  # of the logarithm of a scale
SMALLEST_STD = 1e-8  # below which an imbalance counts no further
GAIN = 1e-3  # by which a round has to be better


@dataclass(frozen=True)
class DualScale:
    """KVarN: `x ~ outer * (scale * code + bias)`, with scales for the tokens and the channels of a tile.

    bits: bits per code: 2, 3, 4 or 8.
    axis: "channel" (keys): scale and bias per channel, `outer` per token. "token" (values): scale and
        bias per token, `outer` per channel.
    unit_std: divide the tile by its standard deviation first, so that the floor of the published
        scales (.741) does not switch them off in tiles of small values.
    quantile: share of a row that is clipped at either end (KVARN_RTN_QUANTILE), below .5; 0 clips nothing.
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

    @property
    def tensors(self) -> set[str]:
        """The tensors of P pages: codes [B, G, T, W] words; float16 scale and bias [B, G, P, R] and outer
        [B, G, T, 1] (axis channel), or scale and bias [B, G, T, 1] and outer [B, G, P, R] (axis token)."""
        return {"codes", "scale", "bias", "outer"}

    def group_size(self, dims: int, page: int) -> int:
        """Return the values per scale: a whole token, or a whole channel of a page."""
        return dims if self.axis == "token" else page

    def bits_per_value(self, dims: int, page: int) -> float:
        """Return stored bits per value: codes in whole 32-bit words; scale and bias along one axis of the
        tile and `outer` along the other, 16 bits each."""
        words = -(-dims * self.bits // 32)
        tokens, channels = (1, 2) if self.axis == "channel" else (2, 1)
        return 32 * words / dims + 16 * (tokens / dims + channels / page)

    def why_not(self, dims: int, page: int) -> str | None:
        """Return why `dims` stored dims in pages of `page` tokens cannot be encoded, or None."""
        return _why_no_tile(page)


@dataclass(frozen=True)
class Polar:
    """PolarQuant (Wu et al., arXiv 2502.00527): dims i and i + R/2, which RoPE turns together, as polar
    coordinates. For keys after RoPE, without a transform.

    radius, angle: bits of each, 1 to 4. Each has a range per pair over the tokens of a page; a code
        decodes to the middle of its step.
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
        """Bits of the wider of the two."""
        return max(self.radius, self.angle)

    @property
    def pair_bits(self) -> int:
        """Bits per code: the radius above the angle."""
        return self.radius + self.angle

    @property
    def label(self) -> str:
        return f"polar, radius int{self.radius} and angle int{self.angle} per pair of channels"

    @property
    def tensors(self) -> set[str]:
        """The tensors of P pages: codes [B, G, T, W] words, R/2 codes of a token, the radius above the
        angle; float16 numbers [B, G, P, R/2]."""
        return {"codes", *POLAR_NUMBERS}

    def group_size(self, dims: int, page: int) -> int:
        """Return the values per range: the tokens of a page."""
        return page

    def bits_per_value(self, dims: int, page: int) -> float:
        """Return stored bits per value: codes in whole 32-bit words, four 16-bit numbers per pair and
        page."""
        words = -(-dims * self.pair_bits // 64)
        return 32 * words / dims + 16 * 2 / page

    def why_not(self, dims: int, page: int) -> str | None:
        """Return why `dims` stored dims in pages of `page` tokens cannot be encoded, or None."""
        if dims % 2:
            return f"polar takes pairs of dims; got {dims}"
        return _why_no_tile(page)


@dataclass(frozen=True)
class Kitty:
    """Kitty (arXiv 2511.18643): `x ~ scale * code + bias` per channel of a page, 2 bits, and 4 for the channels
    of largest mean absolute value. For keys.

    share: of the channels that take 4 bits, rounded down.
    """

    share: float = 0.125
    bits: ClassVar[int] = 2
    least: ClassVar[int] = 3  # the largest code of 2 bits, and of 4
    most: ClassVar[int] = 15

    def __post_init__(self):
        if not 0 < self.share < 1:
            raise UserError(f"[Kitty] share must be above 0 and below 1; got {self.share}")

    def count(self, dims: int) -> int:
        """Return how many channels take 4 bits."""
        return int(self.share * dims + 1e-6)

    @property
    def label(self) -> str:
        return f"int{self.bits} per channel, {100 * self.share:g} % of them int4"

    @property
    def tensors(self) -> set[str]:
        """The tensors of P pages, N channels of 4 bits: codes [B, G, T, W] words, 2 bits of each channel, the high
        ones of wide codes; more [B, G, T, ceil(2 N / 32)] words, their low bits; channels [B, G, P, ceil(R / 32)]
        words, a bit per channel; scale and bias float16 [B, G, P, R]."""
        return {"codes", "more", "channels", "scale", "bias"}

    def bits_per_value(self, dims: int, page: int) -> float:
        """Return stored bits per value: codes and marks in whole 32-bit words, 16-bit scales and biases."""
        words = -(-dims * self.bits // 32) + -(-self.count(dims) * self.bits // 32)
        return 32 * words / dims + (32 + 32 * -(-dims // 32) / dims) / page

    def why_not(self, dims: int, page: int) -> str | None:
        """Return why `dims` stored dims in pages of `page` tokens cannot be encoded, or None."""
        if not self.count(dims):
            return f"a share of {self.share:g} of {dims} dims is no channel"
        return _why_no_tile(page)


def _why_no_tile(page: int) -> str | None:
    if page < LEAST_TILE:
        return f"a page of {page} tokens is no tile; it takes {LEAST_TILE} at least"
    return None
