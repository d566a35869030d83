"""Quantizers as frozen data, with scales per tile (the page of one kv head): PolarQuant (Wu et al.).

Letters: `R` stored dims per token, `page` tokens encoded together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlxkv.errors import UserError
from mlxkv.formats.affine import Method

POLAR_BITS = (1, 2, 3, 4)
POLAR_NUMBERS = ("radius_step", "radius_low", "angle_step", "angle_low")
LEAST_TILE = 32  # tokens: the standard deviation or range of fewer says little


@dataclass(frozen=True)
class Polar(Method):
    """PolarQuant (Wu et al., arXiv 2502.00527): dims i and i + R/2, which RoPE turns together, as polar
    coordinates. For keys after RoPE, without a transform.

    radius, angle: bits of each, 1 to 4. Each has a range per pair over the tokens of a page; a code
        decodes to the middle of its step.
    """

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
        words = -(-dims * self.pair_bits // 64)
        return 32 * words / dims + 16 * 2 / page

    def why_not(self, dims: int, page: int) -> str | None:
        if dims % 2:
            return f"polar takes pairs of dims; got {dims}"
        if page < LEAST_TILE:
            return f"a page of {page} tokens is no tile; it takes {LEAST_TILE} at least"
        return None
