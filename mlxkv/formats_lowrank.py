"""Low rank as frozen data: how many dims are stored, and whether their basis follows the text.

Letters as in `mlxkv.config`; no framework is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from mlxkv.errors import UserError

TRANSPORT, SEGMENTS, STAY = "transport", "segments", "stay"
STORED = (TRANSPORT, SEGMENTS, STAY)
LEAST = 8  # stored dims
SETTLED = 32  # pages that a run may have and still be moved at every step


@dataclass(frozen=True)
class Half:
    """Numbers as they come, in float16 whatever the type of the model."""

    @property
    def label(self) -> str:
        return "float16"

    def bits_per_value(self, dims: int, page: int) -> float:
        """Stored bits per stored value."""
        return 16.0

    def why_not(self, dims: int, page: int) -> str | None:
        """Why `dims` stored dims in pages of `page` tokens cannot be encoded, or None."""
        return None

    def clip_rank(self, dims: int) -> int:
        """As `Affine.clip_rank`: nothing is clipped."""
        return 1


@dataclass(frozen=True)
class LowRank:
    """stored = x @ U, U [D, R] the leading directions of a calibration (EigenAttention, OjaKV).

    One of: share, R over the head dim; rank, R itself; energy, the share of the second moment that R
        directions of every kv head hold, the layer's largest R for all (OjaKV, A.2). R is even.
    follows: U follows the text by Oja's rule. prefill_rate, decode_rate: its rates. every: tokens
        decoded between two updates. salient: share of the tokens of a prompt (of each chunk that is
        read at once) that update U. window: last queries, by whose scores they are found.
    stored: what becomes of the tokens of an old U: "transport" into the new one, "segments" that keep
        their own, at most `segments` of them, "stay" as they are.
    raw: the paper's update, without normalisation.
    mixed: the R dims are mixed (SRFT), for codes, which share a scale.
    """

    share: float = 0.0
    rank: int = 0
    energy: float = 0.0
    follows: bool = False
    prefill_rate: float = 0.10
    decode_rate: float = 0.05
    every: int = 32
    salient: float = 0.05
    window: int = 32
    stored: str = SEGMENTS
    segments: int = 2
    raw: bool = False
    mixed: bool = False

    def __post_init__(self):
        given = [x for x in (self.share, self.rank, self.energy) if x]
        if len(given) != 1 or not (0 <= self.share <= 1 and 0 <= self.energy < 1):
            raise UserError(
                "[LowRank] needs one of share (above 0 and up to 1), rank, energy (below 1); got "
                f"{self.share}, {self.rank}, {self.energy}"
            )
        if self.rank and (self.rank < LEAST or self.rank % 2):
            raise UserError(f"[LowRank] rank must be even, {LEAST} or more; got {self.rank}")
        if self.stored not in STORED:
            choices = ", ".join(STORED)
            raise UserError(f"[LowRank] unknown stored; got {self.stored!r}; choose from {choices}")
        if min(self.every, self.window, self.segments) < 1 or not 0 < self.salient <= 1:
            raise UserError(
                "[LowRank] every, window and segments must be 1 or more, salient a share; got "
                f"{self.every}, {self.window}, {self.segments}, {self.salient}"
            )

    @property
    def label(self) -> str:
        size = f"rank {self.rank}" if self.rank else f"{self.share:g} of the dims"
        size = f"{100 * self.energy:g} % energy" if self.energy else size
        return f"{'oja' if self.follows else 'pca'} {size}"

    @property
    def runs(self) -> int:
        """Of pages, at most: each has a basis."""
        return self.segments if self.stored == SEGMENTS else 1

    def dims(self, head_dim: int) -> int:
        """R. Where energy decides, which only a calibration can say, the head dim itself."""
        if self.energy:
            return head_dim
        return self.rank or min(head_dim, max(LEAST, 2 * round(self.share * head_dim / 2)))

    def why_not(self, head_dim: int) -> str | None:
        """Why heads of this dim have no such basis, or None."""
        if self.dims(head_dim) > head_dim:
            return f"rank {self.rank} is more than the {head_dim} dims of a head"
        return None


def joining(counts: list[int]) -> int:
    """Which of runs of so many pages joins the next one: that of the fewest, of which the later. But the
    last before the new one would be moved again and again: a long one is joined by that before it."""
    last = len(counts) - 2
    at = min(range(last + 1), key=lambda i: (counts[i], -i))
    # Fewest pages are moved in all with sqrt(P) while text is decoded, sqrt(64 P) while a prompt is read.
    settled = at == last > 0 and counts[at] > max(SETTLED, isqrt(8 * counts[at - 1]))
    return at - 1 if settled else at
