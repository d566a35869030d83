"""Sum the second moments of what a layer stores and of what reads it, while a text is read."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlxkv.codec import transform
from mlxkv.formats.calibration.artifact import SIDES
from mlxkv.models.calibration.latents import Readers
from mlxkv.models.hooks.probe import Shape
from mlxkv.models.hooks.taps import AttentionCall

SINK = 64  # first tokens of a window, which presets keep exact
ROWS = 4096  # of a sample, at most, per kv head


@dataclass
class Sample:
    """Every `every`-th of the keys and values of one layer that caches would compress.

    keys, values: parts [G, N, D] in the model's dtype. seen: how many there were.
    """

    every: int
    keys: list[mx.array] = field(default_factory=list)
    values: list[mx.array] = field(default_factory=list)
    seen: int = 0

    def add(self, keys: mx.array, values: mx.array) -> None:
        """Add keys, values: [1, G, L, D], in the order of the text."""
        first = -self.seen % self.every
        self.seen += keys.shape[2]
        if first < keys.shape[2]:
            # Copies: a view would keep the whole array alive.
            pair = [mx.contiguous(x[0, :, first :: self.every]) for x in (keys, values)]
            mx.eval(pair)
            self.keys.append(pair[0])
            self.values.append(pair[1])

    def rows(self, side: str) -> mx.array:
        """All rows of a side, [G, N, D] float32."""
        return mx.concatenate(getattr(self, side), axis=1).astype(mx.float32)


@dataclass
class Moments:
    """Sums of x^T x of one layer, and of keys.

    sums: [G, D, D] float64 by name: keys, values (rows of the target), stored keys, stored values
    (what caches were handed). rows: how many rows each sum has. peaks: [G, D] by side, of the
    channels after SRFT, behind the first tokens of a window. total: [G, D] float64, the sum of the
    `counted` keys of each kv head there. weights: Sigma_K of a first pass, for the surrogate. output:
    M_o of `sensitivities`, or None. begun: tokens of this window. sample: the rows to keep, or None.
    readers: of latents, or None; their values are rotary keys, which are stored as they are. seconds: spent
    on sums.
    """

    shape: Shape
    target: str
    sums: dict[str, np.ndarray] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, np.ndarray] = field(default_factory=dict)
    total: np.ndarray | float = 0.0
    counted: int = 0
    weights: mx.array | None = None
    output: np.ndarray | None = None
    begun: int = 0
    sample: Sample | None = None
    readers: Readers | None = None
    seconds: float = 0.0

    def add_queries(self, queries: mx.array, scale: float) -> None:
        """Add the queries that meet latents, [B, H, L, D] (`LatentObserver`)."""
        if self.target == "attention" and self.counted:
            mean = self.total[0] / self.counted
            covariance = self.mean("stored keys")[0] - np.outer(mean, mean)
            self._add("keys", self.readers.rows(queries, scale, covariance))

    def add_attention(self, call: AttentionCall) -> None:
        """Add the queries and outputs of one call of attention, [B, H, L, D]."""
        if self.target == "attention" or (self.target == "surrogate" and self.weights is None):
            self._add("keys", call.queries)
        if self.target == "attention":
            self._add("values", call.out)

    def add_update(self, keys: mx.array, values: mx.array) -> None:
        """Add what a cache was handed, [B, G, L, D]; each token once."""
        skipped = max(0, SINK - self.begun)
        self.begun += keys.shape[2]
        if self.sample is not None and skipped < keys.shape[2]:
            self.sample.add(keys[:, :, skipped:], values[:, :, skipped:])
        if skipped < keys.shape[2]:
            for side, x in zip(SIDES, (keys, values), strict=True):
                self._raise(side, x[:, :, skipped:])
            self.total = self.total + np.array(total(keys[:, :, skipped:]), np.float64)
            self.counted += keys.shape[0] * (keys.shape[2] - skipped)
        if self.target == "attention" and skipped < keys.shape[2]:
            self._add("stored keys", keys[:, :, skipped:])
            self._add("stored values", values[:, :, skipped:])
        elif self.target == "tensor":
            self._add("keys", keys)
            self._add("values", values)
        elif self.weights is not None:
            k = keys.astype(mx.float32)
            energy = ((k @ self.weights) * k).sum(-1, keepdims=True)
            self._add("values", values.astype(mx.float32) * mx.sqrt(mx.maximum(energy, 0)))

    def _add(self, side: str, x: mx.array) -> None:
        mx.eval(x)  # outside of the time that is taken
        start = time.perf_counter()
        moment = second_moment(x, self.shape.heads)
        rows = x.size // (self.shape.heads * x.shape[-1])
        self.sums[side] = self.sums.get(side, 0.0) + np.array(moment, np.float64)
        self.rows[side] = self.rows.get(side, 0) + rows
        self.seconds += time.perf_counter() - start

    def _raise(self, side: str, x: mx.array) -> None:
        found = np.array(peaks(x))
        self.peaks[side] = np.maximum(self.peaks.get(side, found), found)

    def mean(self, side: str) -> np.ndarray:
        mean = self.sums[side] / self.rows[side]
        with_readers = self.readers and side == "keys" and self.target == "attention"
        return self.readers.whole(mean) if with_readers else mean


def second_moment(x: mx.array, kv_heads: int) -> mx.array:
    """x^T x over the rows of each kv head's group: [B, H, L, D] -> [G, D, D] float32."""
    batch, _, _, dims = x.shape
    rows = x.astype(mx.float32).reshape(batch, kv_heads, -1, dims)
    rows = rows.swapaxes(0, 1).reshape(kv_heads, -1, dims)
    return rows.swapaxes(-1, -2) @ rows


def total(x: mx.array) -> mx.array:
    """The sum over tokens: [B, G, L, D] -> [G, D] float32."""
    return x.astype(mx.float32).sum((0, 2))


def peaks(x: mx.array) -> mx.array:
    """The largest absolute values of the channels after SRFT: [B, G, L, D] -> [G, D] float32."""
    return mx.abs(transform.make("srft", x.shape[-1], 0).store(x)).max((0, 2))
