"""Sum the second moments of a layer's keys, values, queries and outputs while a text is read.

Keys and queries with RoPE are rotated back to position 0 before summing, and averaged over the model's positions at
the end (`spec/positions.py`). Half of the weight of keys is the attention they receive (`spec/balanced.py`). Letters:
`B` batch, `G` kv heads, `H` query heads, `L` new tokens, `D` head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxkv.calibration.exchange import ExchangeMeasure
from mlxkv.codec import transform
from mlxkv.codec.transform import Transform
from mlxkv.formats.calibration import rotary
from mlxkv.formats.calibration.artifact import SIDES, Basis
from mlxkv.formats.calibration.balance import Balance
from mlxkv.formats.calibration.rotary import Rotary, drawn
from mlxkv.formats.calibration.sums import (
    AWAY,
    EVERY,
    KEYS,
    READ,
    SINK,
    WEIGHED,
    LayerSums,
    Sums,
)
from mlxkv.metal.launch import device_type
from mlxkv.patching.observers import AttentionCall, LatentObserver, PlainObserver
from mlxkv.patching.probe import ProbedShape
from mlxkv.patching.trees import Place, class_of, leaves, own_caches, put

# -- Weight stored keys by the attention of far queries. Spec: `mlxkv.spec.balanced`.


def far_attention(call: AttentionCall, sink: int) -> tuple[mx.array, mx.array] | None:
    """Return the asked queries [C], by their index in the call, and their attention [B, H, C, T] to far tokens, 0
    elsewhere; None if no query is far from a key after the first `sink`."""
    keys, new = call.exact[0], call.queries.shape[2]
    total = keys.shape[2]
    at = np.arange(total - new, total)
    rows = np.flatnonzero((at % EVERY == 0) & (at - AWAY > sink))
    if not len(rows):
        return None
    rows, at, place = mx.array(rows), mx.array(at[rows])[:, None], mx.arange(total)
    p = call.weights(rows, call.scores(rows, keys))
    return rows, mx.where(place < at - AWAY, p, 0)


def received(far: mx.array, kv_heads: int) -> np.ndarray:
    """Return the attention [G, T] of far queries to each key in one call, summed over its query heads."""
    batch, *_, total = far.shape
    return np.array(far.reshape(batch, kv_heads, -1, total).sum((0, 2)), np.float64)


# -- Attention by NumPy, whose exp has vector instructions on every CPU. MLX's has none on x86, and takes half of a
# calibration's time there.


@np.errstate(invalid="ignore", over="ignore")  # `LayerSums.basis` looks for NaN and infinity
def by_numpy(call: AttentionCall) -> AttentionCall:
    """Return the call with its output [1, H, L, Dv] computed by NumPy, if that is causal attention in float32 on a CPU;
    otherwise unchanged. MLX's own output is lazy, and not computed then."""
    (keys, values), queries = call.exact, call.queries
    causal = isinstance(call.mask, str) and call.mask == "causal"
    special = call.sinks is not None or call.softcap is not None or queries.shape[0] > 1
    if not causal or special or device_type() != "cpu":
        return call
    if any(x.dtype != mx.float32 for x in (queries, keys, values)):
        return call
    (_, heads, new, dims), (_, kv_heads, total, _) = queries.shape, keys.shape
    grouped_queries = np.asarray(queries).reshape(kv_heads, -1, dims) * np.float32(call.scale)
    later, out = np.triu(np.full((new, new), -np.inf, np.float32), 1), []
    for q, k, v in zip(grouped_queries, np.asarray(keys)[0], np.asarray(values)[0], strict=True):
        scores = (q @ k.T).reshape(-1, new, total)
        scores[..., total - new :] += later
        scores -= scores.max(-1, keepdims=True)
        weights = np.exp(scores, out=scores).reshape(-1, total)
        out.append(weights @ v / weights.sum(-1, keepdims=True))
    mixed = np.stack(out).reshape(1, heads, new, -1)
    return replace(call, out=mx.array(mixed))


# -- Readers of the latents of an MLA layer: the queries over them, and the map from latents to values.
#
# A latent is key and value at once, so one map serves both: the reading moment is a sum of two second moments. To
# first order an error e of a latent moves the output of head h by p (scale q . e) W (c - mean) + p W e, where p is the
# weight of its token, q the absorbed query and W the map from latents to values. Its mean square, less p^2, is
# e^T M e with
#
#     M = sum over heads of  scale^2 tr(W C W^T) E[q q^T] + W^T W
#
# and C the covariance of latents. Spec: `spec.affine.latent_readers`. Letters: `R` latent dims, `D` dims of a head
# without positions, `Dv` of its values.


class Readers:
    """The readers of the latents of one layer. module: its attention."""

    def __init__(self, module: nn.Module, rank: int):
        self.module: Any = module  # by mlx's annotations an attribute of a module is None
        self.rank = rank
        self._spread: mx.array | None = None  # [H], the root of the trace, set by the first tokens

    def rows(self, queries: mx.array, scale: float, covariance: np.ndarray) -> mx.array:
        """Return rows [B, H, L, R] whose mean square is the first term of M over H.

        queries: of a prefill, [B, H, L, D], with their rotary part, if any, after the D dims. covariance: C [R, R].
        """
        nothing = mx.zeros((1, 1, 1, self.rank))
        dims = self.module.embed_q(nothing, transpose=False).shape[-1]
        absorbed = self.module.embed_q(queries[..., :dims]).astype(mx.float32)
        if self._spread is None:
            made = self._made()
            moved = np.einsum("hrv,rs,hsv->h", made, covariance, made, optimize=True)
            self._spread = mx.array(np.sqrt(np.maximum(moved, 0)).astype(np.float32))
        return absorbed * (scale * self._spread)[None, :, None, None]

    def whole(self, mean: np.ndarray) -> np.ndarray:
        """Return M [1, R, R] from the mean square [1, R, R] of `rows`."""
        made = self._made()
        return len(made) * mean + np.einsum("hrv,hsv->rs", made, made, optimize=True)[None]

    def _made(self) -> np.ndarray:
        """Return W^T of each head, [H, R, Dv] float64. Calls the map instead of reading its weights, which may be
        quantised."""
        eye = mx.eye(self.rank)[None, None]
        return np.array(self.module.unembed_out(eye)[0].astype(mx.float32), np.float64)


ROWS = 4096  # most rows of a sample per kv head


@dataclass
class Sample:
    """Every `every`-th of the compressible keys and values of one layer.

    keys, values: parts [G, N, D]. seen: the number of tokens so far.
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
        """Return all rows of a side, [G, N, D] float32."""
        return mx.concatenate(getattr(self, side), axis=1).astype(mx.float32)


@dataclass
class Moments(LayerSums):
    """Sums of one layer of this shape.

    begun: tokens of this window. received: [G, T], the attention to its keys, or None. sample: the rows to keep, keys
    rotated to positions of `spans`, or None. readers: of latents, or None; the values of latents are rotary keys,
    stored unchanged.
    """

    shape: ProbedShape = field(kw_only=True)
    begun: int = 0
    received: np.ndarray | None = None
    exchange: ExchangeMeasure | None = None
    sample: Sample | None = None
    readers: Readers | None = None

    def observer(self) -> PlainObserver | LatentObserver:
        """Return a cache for the next window, which adds what it sees to these sums."""
        self.begun = 0
        if self.readers is None:
            return PlainObserver(self.add_attention, self.add_update)
        return LatentObserver(self.add_queries, self.add_update)

    def add_queries(self, queries: mx.array, scale: float) -> None:
        """Add the queries over latents, [B, H, L, D] (`LatentObserver`)."""
        if self.readers is not None and KEYS in self.sums:
            keys = self.sums[KEYS]
            mean = keys.mean()[0]
            covariance = keys.moment()[0] - np.outer(mean, mean)
            self._add("keys", self.readers.rows(queries, scale, covariance))

    def add_attention(self, call: AttentionCall) -> mx.array:
        """Add the queries and outputs of one call of attention, [B, H, L, D]. Returns the outputs."""
        call = by_numpy(call)
        start = call.exact[0].shape[2] - call.queries.shape[2]
        self._add("keys", self._at_zero(call.queries, start))
        self._add("values", call.out)
        if (far := far_attention(call, SINK)) is not None:
            weights = received(far[1], self.shape.heads)
            if self.received is not None:
                weights[:, : self.received.shape[1]] += self.received
            self.received = weights
            if self.exchange is not None:
                costs = self.exchange.add(call, *far, SINK)
                at = start + np.array(far[0])
                queries = rotate(call.queries[:, :, far[0]], self.rotary, -at)
                self._add(WEIGHED, queries, costs)
        return call.out

    def add_update(self, keys: mx.array, values: mx.array) -> None:
        """Add new keys and values of a cache, [B, G, L, D]; each token once."""
        start, skipped = self.begun, max(0, SINK - self.begun)
        self.begun += keys.shape[2]
        if skipped >= keys.shape[2]:
            return
        keys, values, start = keys[:, :, skipped:], values[:, :, skipped:], start + skipped
        for side, x in zip(SIDES, (keys, values), strict=True):
            self.raise_peaks(side, np.array(peaks(x)))
        if self.sample is not None:
            self.sample.add(self._spread(keys, start, self.sample.seen), values)
        self._add(KEYS, self._at_zero(keys, start))
        self._add("stored values", values)

    def end_window(self, keys: mx.array) -> None:
        """Add all keys of a window, [B, G, L, D], weighted by the attention they received."""
        if self.received is None:
            return
        weights = self.received[:, SINK:]
        rows = grouped(
            self._at_zero(keys, 0)[:, :, SINK : self.received.shape[1]], self.shape.heads
        )
        read = self.sums.setdefault(READ, Sums(self.sums[KEYS].centre))
        added = products(rows, mx.array(read.centre), mx.array(weights.astype(np.float32)))
        read.add(np.array(added[0]), np.array(added[1]), weights.sum(1))
        self.received = None

    def _at_zero(self, x: mx.array, start: int) -> mx.array:
        """Rotate keys or queries of positions from `start` on back to position 0."""
        return rotate(x, self.rotary, -np.arange(start, start + x.shape[2]))

    def _spread(self, keys: mx.array, start: int, seen: int) -> mx.array:
        """Rotate keys of positions from `start` on, after `seen` others, to positions spread over `spans`."""
        count = keys.shape[2]
        to = drawn(seen, count, self.spans) if self.spans else 0
        return rotate(keys, self.rotary, to - np.arange(start, start + count))

    def _add(self, name: str, x: mx.array, weights: mx.array | None = None) -> None:
        rows = grouped(x, self.shape.heads)
        if name not in self.sums:
            self.sums[name] = Sums(np.array(rows.mean(1)))
        added = products(rows, mx.array(self.sums[name].centre), weights)
        count = rows.shape[1] if weights is None else np.array(weights, np.float64).sum(1)
        self.sums[name].add(np.array(added[0]), np.array(added[1]), count)

    def moment(self, name: str) -> np.ndarray:
        """Return the second moment [G, D, D] of a sum, over the positions of `spans`; for the "keys" of latents, M."""
        if self.readers and name == "keys":
            return self.readers.whole(self.sums[name].moment())
        return super().moment(name)

    def basis(self, side: str, label: str) -> Basis:
        """Return the maps of "keys" or "values". Raises MachineError for NaN or infinity."""
        if self.readers and side == "values":  # rotary keys, which no map rotates
            dims = self.shape.value_dim
            return unit_basis(np.broadcast_to(np.eye(dims), (self.shape.heads, dims, dims)), side)
        return super().basis(side, label)


def unit_basis(vectors: np.ndarray, side: str) -> Basis:
    """Return the basis of these vectors [G, D, D], with all moments I."""
    vectors = vectors.astype(np.float32)
    ones = np.ones(vectors.shape[:2], np.float32)
    mean = np.zeros_like(ones) if side == "keys" else None
    return Basis(ones, vectors, Balance(vectors, ones), ones, mean=mean)


def rotate(x: mx.array, rotary: Rotary | None, t: np.ndarray) -> mx.array:
    """Return x [B, H, L, D] float32, token n rotated by t[n] positions; unchanged without RoPE."""
    if rotary is None or not len(rotary.pairs):
        return x
    partner, *factors = rotary.wheel(t, x.shape[-1])
    cos, sin = (mx.array(factor.astype(np.float32)) for factor in factors)
    x = x.astype(mx.float32)
    return x * cos + x[..., mx.array(partner)] * sin


def grouped(x: mx.array, kv_heads: int) -> mx.array:
    """Return the rows of each kv head's group, [B, H, L, D] -> [G, N, D] float32."""
    batch, _, _, dims = x.shape
    rows = x.astype(mx.float32).reshape(batch, kv_heads, -1, dims)
    return rows.swapaxes(0, 1).reshape(kv_heads, -1, dims)


def products(
    rows: mx.array, centre: mx.array, weights: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Return the sums of w y^T y [G, D, D] and of w y [G, D] over y = x - centre, of rows x [G, N, D].

    weights: w [G, N]; None for 1."""
    left = rows - centre[:, None]
    weighted = left if weights is None else left * weights[..., None]
    return weighted.swapaxes(-1, -2) @ left, weighted.sum(1)


def peaks(x: mx.array) -> mx.array:
    """Return the largest absolute values of the channels after SRFT: [B, G, L, D] -> [G, D] float32."""
    return mx.abs(srft(x.shape[-1]).store(x)).max((0, 2))


def srft(dims: int) -> Transform:
    """Return the SRFT that learned transforms are compared with."""
    return cast(Transform, transform.make("srft", dims, 0))  # None only for "none"


# -- Measure how a model's keys rotate with their position.
#
# A token that attends only to itself computes the same at every position, except for the rotation of its keys: the
# model runs on single tokens with empty caches that claim position t. That is exact for every layer, family and kind
# of RoPE, and needs no config.

RESOLUTION = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


Ropes = list[tuple[mx.array, mx.array]]


@contextmanager
def _exact_ropes() -> Iterator[Ropes]:
    """Yield a list of what `mx.fast.rope` returns, beside the same in float32: rounded to 16 bits, keys hide how far
    slow pairs rotate."""
    own, ropes = mx.fast.rope, []

    def rope(a: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        exact = own(a.astype(mx.float32), *args, **kwargs)
        ropes.append((exact.astype(a.dtype), exact))
        return ropes[-1][0]

    mx.fast.rope = rope
    try:
        yield ropes
    finally:
        mx.fast.rope = own


def _exact(keys: mx.array, ropes: Ropes) -> mx.array:
    """Return keys [B, G, L, D] as `ropes` has them, all channels or the last ones; as they are, if it has them not."""
    batch, heads, count, dims = keys.shape
    for rounded, exact in reversed(ropes):
        start = dims - rounded.shape[-1]
        if start >= 0 and rounded.shape[:-1] in ((batch, heads, count), (batch, 1, count)):
            rest, rotated = keys[..., :start], keys[..., start:]
            if mx.array_equal(rotated, mx.broadcast_to(rounded, rotated.shape)):
                exact = mx.broadcast_to(exact, rotated.shape)
                return mx.concatenate([rest.astype(mx.float32), exact], axis=-1)
    return keys


class PositionCache:
    """An empty cache at position `offset` that records the keys passed to it, and as `ropes` has them."""

    def __init__(self, offset: int, ropes: Ropes):
        self.offset, self.ropes = offset, ropes
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.exact: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = keys, values
        self.exact = _exact(keys, self.ropes)
        self.offset += keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return them as passed in, for layers that read another layer's."""
        return cast(tuple[mx.array, mx.array], (self.keys, self.values))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        return None  # one token attends to itself

    def empty(self) -> bool:
        return True


def rotations(
    model: nn.Module, places: Iterable[Place], tokens: mx.array, longest: int
) -> dict[Place, Rotary | None]:
    """Return how keys of the caches at `places` rotate up to position `longest`; None if not as in RoPE.

    tokens: [PROBES] ids, of any text.
    """
    places = list(places)
    kept: dict[Place, dict[int, np.ndarray]] = {place: {} for place in places}
    resolutions: dict[Place, list[float]] = {}
    for t in rotary.positions(longest):
        caches = own_caches(model)
        with _exact_ropes() as ropes:
            for place, cache in leaves(caches):
                if class_of(cache).has_keys:
                    put(caches, place, PositionCache(t, ropes))
            model(tokens[:, None], cache=caches)
        caches_by_place = dict(leaves(caches))
        for place in places:
            keys, given = caches_by_place[place].exact, caches_by_place[place].keys
            resolutions[place] = [RESOLUTION[x.dtype] for x in (keys, given)]
            rows = keys.astype(mx.float32).reshape(-1, keys.shape[-1])
            kept[place][t] = np.array(rows)
    return {place: rotary.measured(kept[place], *resolutions[place]) for place in places}
