"""Sum rows and their products in float64, about a row near their mean, and make maps from the sums. NumPy.

The framework computes products of rows in float32. Keys whose mean is far larger than their deviations (Qwen2.5) would
lose precision, so a `centre` is subtracted first and added back here. Letters: `G` kv heads, `D` head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from mlxkv import console
from mlxkv.errors import MachineError
from mlxkv.formats import matrices
from mlxkv.formats.calibration import balance
from mlxkv.formats.calibration.artifact import Basis
from mlxkv.formats.calibration.balance import Balance
from mlxkv.formats.calibration.rotary import Rotary, Span

# Keys that caches would compress: all alike, and by their attention.
KEYS, READ = "stored keys", "read keys"
WEIGHED = "weighed queries"  # by what errors of their scores cost
READ_BY_COST = 0.75  # the share of queries' weight that is this cost (`mlxkv.spec.mixed_bits`)

# What both tracks read of a text.
LEAST = 512  # tokens: fewer are too few for heads of 64 to 256 dims
WINDOW = 4096  # tokens that see each other
SINK = 64  # first tokens of a window, which presets keep exact
AWAY = 124  # tokens so near to a query are exact (`mlxkv.spec.balanced`)
EVERY = 8  # one query in so many is asked: scores would cost as much as attention does
PROBES = 32  # tokens whose keys are compared from position to position
# Tokens that are differentiated at once, which bounds memory; how often; the first ones, whose outputs are not asked.
DIFFERENTIATED, TIMES, FIRST = 256, 4, 64

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
    weight: np.ndarray = field(default_factory=lambda: np.zeros(()), init=False)

    @np.errstate(over="ignore", invalid="ignore")  # `LayerSums.basis` looks for NaN and infinity
    def add(self, square: np.ndarray, total: np.ndarray, weight: np.ndarray | float) -> None:
        self.square = self.square + square.astype(np.float64)
        self.total = self.total + total.astype(np.float64)
        self.weight = self.weight + np.broadcast_to(weight, total.shape[:1]).astype(np.float64)

    def mean(self) -> np.ndarray:
        """Return [G, D]."""
        return self.centre + self.total / self._divisor[:, None]

    def moment(self) -> np.ndarray:
        """Return the second moment [G, D, D]."""
        weight = self._divisor[:, None, None]
        centre, off = self.centre.astype(np.float64), self.total / self._divisor[:, None]
        cross = centre[:, :, None] * off[:, None]
        outer = centre[:, :, None] * centre[:, None]
        return self.square / weight + cross + cross.swapaxes(-1, -2) + outer

    @property
    def _divisor(self) -> np.ndarray:
        return np.where(self.weight > 0, self.weight, 1)  # sums of no weight are 0


# -- What errors cost (`mlxkv.spec.mixed_bits`).

LEAST_COST = 1e-4  # of a layer's errors, as a share of the mean: texts differ in what they read
RIDGE = 1e-6  # of the mean of F's diagonal


def information(totals: Mapping[Place, np.ndarray], count: int) -> dict[Place, np.ndarray]:
    """Return F [G, Dv, Dv] of each layer, of sums over `count` tokens. {} for no tokens, and with a line on stderr for
    NaN or infinity, and for 0 in all layers."""
    if not count:
        return {}
    sound = all(np.isfinite(x).all() for x in totals.values())
    if not sound or not any(np.any(x) for x in totals.values()):
        what = "are 0" if sound else "have NaN or infinity"
        console.note(f"[calibrate] errors count alike in all layers: gradients {what}")
        return {}
    return {place: x / count for place, x in totals.items()}


def root(fisher: np.ndarray) -> np.ndarray:
    """Return L [G, Dv, Dv] float32 with L L^T = F [G, Dv, Dv], where F has a ridge. What rounding leaves below it is
    raised to it; a head whose output nothing reads has an F of 0, and so is its L."""
    ridge = RIDGE * np.trace(fisher, axis1=-2, axis2=-1)[:, None] / fisher.shape[-1]
    values, vectors = np.linalg.eigh(fisher)
    return (vectors * np.sqrt(np.maximum(values, 0) + ridge)[:, None]).astype(np.float32)


@dataclass
class Exchange:
    """Costs of errors of one layer. fisher: F [G, Dv, Dv] of its outputs. keys, values: [G], the sums of
    p^2 |v - out|^2 in F, and of p^2, over all far tokens of `queries` queries."""

    fisher: np.ndarray
    keys: np.ndarray | float = 0.0
    values: np.ndarray | float = 0.0
    queries: int = 0

    def costs(self, moment: np.ndarray) -> np.ndarray | None:
        """Return [2, G]: what one nat^2 of noise in the scores of keys costs, and values lost as a whole, whose second
        moment is [G, Dv, Dv]. None where no query was far from anything."""
        if not self.queries:
            return None
        lost = self.values * np.einsum("gde,gde->g", self.fisher, moment)
        return np.stack([self.keys, lost]) / self.queries


def floored(by_layer: Mapping[Place, np.ndarray | None]) -> dict[Place, np.ndarray]:
    """Return the costs [2, G] of each layer, float32, at least LEAST_COST of their mean; {} if one is missing."""
    costs = [x for x in by_layer.values() if x is not None]
    if len(costs) < len(by_layer) or not all(np.isfinite(x).all() for x in costs):
        return {}
    least = LEAST_COST * np.mean(np.concatenate([np.zeros(0), *map(np.ravel, costs)]))
    if not least > 0:
        return {}
    floored_costs = (np.maximum(x, least).astype(np.float32) for x in costs)
    return dict(zip(by_layer, floored_costs, strict=True))


# -- All sums of one layer, and the maps that are made of them. Spec: `mlxkv.spec.oscar`, `mlxkv.spec.balanced`.


@dataclass
class LayerSums:
    """Sums of one layer.

    rotary: how keys and queries rotate; None where it is not as RoPE does: they are summed as they are, else at
    position 0. spans: of positions to average over. sums: by name: "keys" and "values" (rows of the target), WEIGHED,
    KEYS, READ and "stored values" (what caches were handed). peaks: [G, D] by side, of the channels after SRFT,
    behind the first tokens of a window, at the positions of the text. output: what output projections make of errors
    in values, [G, D, D], or None. exchange: what errors of keys and values cost, or None.
    """

    rotary: Rotary | None = None
    spans: Sequence[Span] = ()
    sums: dict[str, Sums] = field(default_factory=dict)
    peaks: dict[str, np.ndarray] = field(default_factory=dict)
    output: np.ndarray | None = None
    exchange: Exchange | None = None

    def raise_peaks(self, side: str, largest: np.ndarray) -> None:
        """Update the peaks by the largest values of a part of the text."""
        self.peaks[side] = np.maximum(self.peaks.get(side, largest), largest)

    def moment(self, name: str) -> np.ndarray:
        """Return the second moment [G, D, D] of a sum; over the positions of `spans` of keys and queries, if they
        rotate."""
        moment = self._halves(Sums.moment) if name == KEYS else self.sums[name].moment()
        if self.rotary is None or name not in ("keys", KEYS, WEIGHED):
            return moment
        return self.rotary.moment_over(moment, self.spans)

    def _halves(self, of: Callable[[Sums], np.ndarray]) -> np.ndarray:
        """Half of all stored keys alike, half by the attention that they get (`mlxkv.spec.balanced`); alike in heads
        where they get none."""
        alike, read = of(self.sums[KEYS]), self.sums.get(READ)
        return alike if read is None else _by_weight((alike + of(read)) / 2, alike, read)

    def _key_mean(self) -> np.ndarray:
        """Return the mean [G, D] of stored keys over the positions of `spans`."""
        mean = self._halves(Sums.mean)
        return mean if self.rotary is None else self.rotary.mean_over(mean, self.spans)

    def _weighed_queries(self) -> np.ndarray | None:
        """Return the second moment [G, D, D] of queries over the positions of `spans`, READ_BY_COST of it of WEIGHED,
        of all alike otherwise, and in heads where errors cost nothing; None where there are none of WEIGHED, or all
        are 0."""
        weighed = self.sums.get(WEIGHED)
        if weighed is None or not (weighed.weight > 0).any():
            return None
        alike = self.moment("keys")
        mixed = (1 - READ_BY_COST) * alike + READ_BY_COST * self.moment(WEIGHED)
        mixed = _by_weight(mixed, alike, weighed)
        return mixed if mixed.any() else None

    @np.errstate(over="ignore", invalid="ignore")  # `floored` looks for infinity
    def costs(self) -> np.ndarray | None:
        """Return the costs of errors of keys and of values, [2, G], or None if not measured."""
        if self.exchange is None or "stored values" not in self.sums:
            return None
        return self.exchange.costs(self.moment("stored values"))

    @np.errstate(over="ignore", invalid="ignore")  # `_sound` looks for them
    def basis(self, side: str, label: str) -> Basis:
        """Return the maps of "keys" or "values", which errors call `label`. Raises MachineError for NaN or infinity."""
        moment = _sound(self.moment(side), label)
        values, vectors, floored = matrices.eigenbasis(moment)
        peaks = _sound(self.peaks[side], label)
        of_keys = (self._key_mean(), self._weighed_queries()) if side == "keys" else (None, None)
        mean, queries = (
            None if x is None else _sound(x, label).astype(np.float32) for x in of_keys
        )
        return Basis(
            values.astype(np.float32),
            vectors.astype(np.float32),
            self._balance(side, label, moment),
            np.where(peaks > 0, peaks, 1).astype(np.float32),
            floored,
            mean=mean,
            queries=queries,
        )

    def _balance(self, side: str, label: str, reads: np.ndarray) -> Balance:
        """Return the balanced transform of a side. reads: the second moment of queries, used for keys."""
        noise = _sound(self.moment(f"stored {side}"), label)
        if side == "values":
            eye = np.broadcast_to(np.eye(noise.shape[-1]), noise.shape)
            reads = eye if self.output is None else self.output
        down, sigma, floored = balance.balance(noise, reads)
        if side == "values":  # the unit of errors is free: stored values keep their size
            size = np.trace(noise, axis1=-2, axis2=-1) / sigma.sum(-1)
            size = np.where(size > 0, size, 1)  # nothing is stored in a dead head
            down, sigma = down * np.sqrt(size)[:, None, None], sigma * size[:, None]
        return Balance(down.astype(np.float32), sigma.astype(np.float32), floored)


def _by_weight(x: np.ndarray, other: np.ndarray, sums: Sums) -> np.ndarray:
    """Return x [G, ...] of heads where `sums` has weight, `other` in those where it has none."""
    return np.where((sums.weight > 0).reshape(-1, *[1] * (x.ndim - 1)), x, other)


def _sound(x: np.ndarray, label: str) -> np.ndarray:
    if not np.isfinite(x).all():
        raise MachineError(
            f"[calibrate] NaN or infinity in {label}; the model computes them on this text; try "
            "another --dtype, or other text"
        )
    return x


def windows(tokens: Sequence[int], limit: int) -> list[Sequence[int]]:
    """Split `tokens` into parts of one length, at most `limit`; the last may be a little shorter."""
    size = -(-len(tokens) // max(1, -(-len(tokens) // limit)))
    return [tokens[i : i + size] for i in range(0, len(tokens), size or 1)]
