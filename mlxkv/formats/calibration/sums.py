"""Sum rows and their products in float64, about a row near their mean. NumPy.

Products of rows are made in float32 by the framework that has them. Of keys whose mean is far larger than what varies
(Qwen2.5) they would lose what varies, so a `centre` is taken off first and put back here. Letters: `G` kv heads, `D`
head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from mlxkv.formats.calibration.rotary import Rotary, Span

KEYS, READ = (
    "stored keys",
    "read keys",
)  # those that caches would compress: all alike, and by their attention
WEIGHED = "weighed queries"  # by what errors of their scores cost


Place = TypeVar("Place")  # of a layer


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
    turns = rotary is not None and name in ("keys", KEYS, WEIGHED)
    return rotary.moment_over(moment, spans) if turns else moment


def weighed_over(
    sums: Mapping[str, Sums], rotary: Rotary | None, spans: Sequence[Span]
) -> np.ndarray | None:
    """Return the second moment [G, D, D] of queries over the positions of `spans`, half of all alike, half of WEIGHED;
    None where there are none of these."""
    weighed = sums.get(WEIGHED)
    if weighed is None or not (weighed.weight > 0).all():
        return None
    return sum(moment_over(sums, name, rotary, spans) for name in ("keys", WEIGHED)) / 2


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


# -- What errors cost (`mlxkv.spec.fill`).

LEAST_COST = (
    1e-4  # of a layer's errors, as a share of the mean: a text may not read what another does
)
RIDGE = 1e-6  # of the mean of F's diagonal: its root has to exist


def root(fisher: np.ndarray) -> np.ndarray:
    """Return L [G, Dv, Dv] float32 with L L^T = F [G, Dv, Dv], where F has a ridge."""
    size = np.trace(fisher, axis1=-2, axis2=-1) / fisher.shape[-1]
    ridge = RIDGE * size[:, None, None] * np.eye(fisher.shape[-1])
    return np.linalg.cholesky(fisher + ridge).astype(np.float32)


def costs(
    fisher: np.ndarray, keys: np.ndarray, values: np.ndarray, queries: int, moment: np.ndarray
) -> np.ndarray | None:
    """Return [2, G]: what one nat^2 of noise in the scores of keys costs, and values lost as a whole.

    fisher: F [G, Dv, Dv]. keys, values: [G], the sums of p^2 |v - out|^2 in F, and of p^2, over all far tokens of
    `queries` queries. moment: the second moment [G, Dv, Dv] of values. None where no query was far from anything.
    """
    if not queries:
        return None
    return np.stack([keys, values * np.einsum("gde,gde->g", fisher, moment)]) / queries


def floored(by_layer: Mapping[Place, np.ndarray | None]) -> dict[Place, np.ndarray]:
    """Return the costs [2, G] of each layer, float32, at least LEAST_COST of their mean; {} where one is missing."""
    if any(x is None or not np.isfinite(x).all() for x in by_layer.values()):
        return {}
    least = LEAST_COST * np.mean(
        np.concatenate([np.zeros(0), *(x.ravel() for x in by_layer.values())])
    )
    if not least > 0:
        return {}
    return {place: np.maximum(x, least).astype(np.float32) for place, x in by_layer.items()}
