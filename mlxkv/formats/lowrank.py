"""Low rank as frozen data: how many dims are stored, and whether their basis follows the text.

Letters as in `mlxkv.formats.config`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from mlxkv.errors import UserError

TRANSPORT, SEGMENTS, STAY = "transport", "segments", "stay"
STORED = (TRANSPORT, SEGMENTS, STAY)
LEAST = 8  # stored dims
RIDGE = 0.1  # of the mean energy of a stored dim, added by Oja's rule: what few tokens cannot tell
SETTLED = 32  # pages in a run that may still be moved at every step


@dataclass(frozen=True)
class LowRank:
    """stored = x @ U, with U [D, R] the leading directions of a calibration (EigenAttention, OjaKV).

    share, rank, energy: exactly one is given. share: R over the head dim. rank: R. energy: share of the
        second moment that R directions hold; the largest R of a layer's kv heads serves them all (OjaKV,
        A.2). R is even.
    follows: U follows the text by Oja's rule.
    prefill_rate, decode_rate: learning rates eta of the rule.
    every: decoded tokens between two updates.
    salient: share of the tokens of a prompt (of each prefill chunk) that update U.
    window: last queries, whose scores choose the salient tokens.
    stored: what happens to tokens stored with an older U: "transport" moves them to the new one,
        "segments" keeps their basis, for at most `segments` runs, "stay" does nothing.
    raw: the paper's update, without normalisation.
    mixed: mix the R dims (SRFT), for codes that share a scale.
    pinned: the last `recent` tokens of the first prompt stay exact for good (OjaKV, section 5.1), beside the
        window, which slides on over what is decoded. Without it they are stored once they leave the window.
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
    pinned: bool = False

    def __post_init__(self):
        sizes = [x for x in (self.share, self.rank, self.energy) if x]
        if len(sizes) != 1 or not (0 <= self.share <= 1 and 0 <= self.energy < 1):
            raise UserError(
                "[LowRank] needs one of share (above 0 and up to 1), rank, energy (below 1); got "
                f"{self.share}, {self.rank}, {self.energy}"
            )
        if self.rank and (self.rank < LEAST or self.rank % 2):
            raise UserError(f"[LowRank] rank must be even, {LEAST} or more; got {self.rank}")
        if self.stored not in STORED:
            choices = ", ".join(STORED)
            raise UserError(f"[LowRank] unknown stored; got {self.stored!r}; choose from {choices}")
        if self.pinned and not self.follows:
            raise UserError(
                "[LowRank] pinned is for a basis that follows the text; got a fixed one"
            )
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
        """Return the most runs of pages, each with a basis."""
        return self.segments if self.stored == SEGMENTS else 1

    def rate(self, prompt: bool) -> float:
        """Learning rate of Oja's rule, for tokens of a prompt or decoded ones; 0: the basis does not change."""
        if not self.follows:
            return 0.0
        return self.prefill_rate if prompt else self.decode_rate

    def dims(self, head_dim: int) -> int:
        """Return R, or the head dim if `energy` determines R, which only a calibration knows."""
        if self.energy:
            return head_dim
        return self.rank or min(head_dim, max(LEAST, 2 * round(self.share * head_dim / 2)))

    def why_not(self, head_dim: int) -> str | None:
        """Return why heads of this dim cannot have such a basis, or None."""
        if self.dims(head_dim) > head_dim:
            return f"rank {self.rank} is more than the {head_dim} dims of a head"
        return None


def joining(counts: list[int]) -> int:
    """Choose the run to join to the next one: the shortest, the latest of equals.

    counts: pages per run. The run before the last would be moved repeatedly, so if it is long, its predecessor is
    joined to it instead.
    """
    last = len(counts) - 2
    at = min(range(last + 1), key=lambda i: (counts[i], -i))
    # The total moved is least at sqrt(P) pages while decoding, at sqrt(64 P) while reading a prompt.
    settled = at == last > 0 and counts[at] > max(SETTLED, isqrt(8 * counts[at - 1]))
    return at - 1 if settled else at
