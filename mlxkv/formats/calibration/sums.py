"""Sum rows and their products in float64, about a row near their mean. NumPy.

Products of rows are made in float32 by the framework that has them. Of keys whose mean is far larger than what varies
(Qwen2.5) they would lose what varies, so a `centre` is taken off first and put back here. Letters: `G` kv heads, `D`
head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mlxkv.formats.calibration.rotary import Rotary, Span

KEYS, READ = (
    "stored keys",
    "read keys",
)  # those that caches would compress: all alike, and by their attention
QUERIES, WEIGHED = "keys", "weighed queries"  # all alike, and by what errors of their scores cost


@dataclass
class Sums:
    """Weighted sums of rows of each kv head.

    centre: [G, D] float32. square: [G, D, D], total: [G, D] and weight: [G], float64: the sums of w y^T y, of w y and
    of w over rows y = x - centre.
    """

    centre: np.ndarray
    square: np.ndarray | float = field(default=0.0, init=False)
    total: np.ndarray | float = field(default=0.0, init=False)
    weight: np.ndarray | float = field(default=0.0, init=False)

    def add(self, square: np.ndarray, total: np.ndarray, weight: np.ndarray | float) -> None:
        self.square = self.square + square.astype(np.float64)
        self.total = self.total + total.astype(np.float64)
        self.weight = self.weight + np.broadcast_to(weight, total.shape[:1]).astype(np.float64)

    def mean(self) -> np.ndarray:
        """Return [G, D]."""
        return self.centre + self.total / self.weight[:, None]

    def moment(self) -> np.ndarray:
        """Return the second moment [G, D, D]."""
        weight = self.weight[:, None, None]
        centre, off = self.centre.astype(np.float64), self.total / self.weight[:, None]
        cross = centre[:, :, None] * off[:, None]
        outer = centre[:, :, None] * centre[:, None]
        return self.square / weight + cross + cross.swapaxes(-1, -2) + outer


def moment_over(
    sums: Mapping[str, Sums], name: str, rotary: Rotary | None, spans: Sequence[Span]
) -> np.ndarray:
    """Return the second moment [G, D, D] of a sum; over the positions of `spans` of keys and queries, if they turn."""
    moment = _halves(sums, Sums.moment) if name == KEYS else sums[name].moment()
    turns = rotary is not None and name in (QUERIES, WEIGHED, KEYS)
    return rotary.moment_over(moment, spans) if turns else moment


def mean_over(
    sums: Mapping[str, Sums], rotary: Rotary | None, spans: Sequence[Span]
) -> np.ndarray | None:
    """Return the mean [G, D] of KEYS over the positions of `spans`; None where there are none."""
    if KEYS not in sums:
        return None
    mean = _halves(sums, Sums.mean)
    return mean if rotary is None else rotary.mean_over(mean, spans)


def _halves(sums: Mapping[str, Sums], of: Callable[[Sums], np.ndarray]) -> np.ndarray:
    """Half of all stored keys alike, half by the attention that they get (`mlxkv.spec.balanced`)."""
    alike, read = sums[KEYS], sums.get(READ)
    if read is None or not (read.weight > 0).all():
        return of(alike)
    return (of(alike) + of(read)) / 2
