"""Observe caches and attention of a model while it runs, without changing what it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlxkv.cache.attention import attend
from mlxkv.cache.backends import softmax
from mlxkv.cache.view import Pair, View


class PlainObserver(KVCache):
    """A plain cache that reports its updates and attention over it.

    on_attention: called with each AttentionCall; an array that it returns replaces the output. on_update: called with
    the new keys and values [B, G, L, D] of each update.
    """

    def __init__(
        self,
        on_attention: Callable[[AttentionCall], mx.array | None] | None = None,
        on_update: Callable[[mx.array, mx.array], None] | None = None,
    ):
        super().__init__()
        self.on_attention, self.on_update = on_attention, on_update

    @property
    def exact(self) -> Pair:
        """All keys and values so far, [B, G, T, D]."""
        keys, values = cast(Pair, (self.keys, self.values))  # None before the first update
        return keys[..., : self.offset, :], values[..., : self.offset, :]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[View, View]:
        super().update_and_fetch(keys, values)
        if self.on_update is not None:
            self.on_update(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[View, View]:
        view = ObservedView(self.exact, cache=self)
        return view, view


class LatentObserver(KVCache):
    """A plain cache of latents that reports its updates, and the queries of a prefill.

    on_queries: called with the queries [B, H, L, D] that meet keys made from latents (with their rotary part
    after the D dims, in models that keep both in one array), and the scale. on_update: as in PlainObserver.
    """

    def __init__(
        self,
        on_queries: Callable[[mx.array, float], None],
        on_update: Callable[[mx.array, mx.array], None],
    ):
        super().__init__()
        self.on_queries, self.on_update = on_queries, on_update

    def queried(self, queries: mx.array, scale: float) -> None:
        self.on_queries(queries, scale)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Pair:
        pair = super().update_and_fetch(keys, values)
        self.on_update(keys, values)
        return cast(Pair, pair)


@dataclass(frozen=True)
class ObservedView(View):
    """The view of an observing cache: reports attention over it."""

    cache: PlainObserver = field(kw_only=True, repr=False)

    def attended(
        self, queries, values, cache=None, scale: float = 1.0, mask=None, sinks=None, softcap=None
    ) -> mx.array:
        """Attend as mlxkv does, with mlx-lm's signature, and report the call."""
        out, tell = attend(queries, self, scale, mask, sinks, softcap), self.cache.on_attention
        call = AttentionCall(self.cache.exact, queries, scale, mask, sinks, out, softcap)
        replaced = None if tell is None else tell(call)
        return out if replaced is None else replaced


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention over an observer.

    exact: the keys and values [B, G, T, D] read. queries: [B, H, L, D]. scale, mask, sinks, softcap: as in
    `attend`. out: [B, H, L, Dv].
    """

    exact: Pair
    queries: mx.array
    scale: float
    mask: mx.array | str | None
    sinks: mx.array | None
    out: mx.array
    softcap: float | None = None

    def scores(self, rows: mx.array, keys: mx.array) -> mx.array:
        """Return scores [B, H, N, T] float32 of the queries `rows` [N] over keys [B, G, T, D], before cap and mask."""
        q = self.queries[:, :, rows].astype(mx.float32) * self.scale
        q_grouped = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[3])
        return (q_grouped @ keys.astype(mx.float32).swapaxes(-1, -2)).reshape(*q.shape[:3], -1)

    def weights(self, rows: mx.array, scores: mx.array) -> mx.array:
        """Return attention weights for scores [B, H, N, T] of the queries `rows` [N]."""
        total, mask = scores.shape[3], self.mask
        if not isinstance(mask, mx.array):
            mask = mx.arange(total) <= (total - self.queries.shape[2] + rows)[:, None]
        elif mask.shape[-2] > 1:
            mask = mask[..., rows, :]
        return softmax(scores, mask, self.sinks, self.softcap)


def reads(x: mx.array, out: mx.array) -> bool:
    """Return whether the input `x` of a linear map is exactly the output of attention, [B, H, L, Dv]."""
    flat = joined(out)
    return x.shape == flat.shape and bool(mx.array_equal(x, flat.astype(x.dtype)))


def joined(heads: mx.array) -> mx.array:
    """[B, H, L, Dv] -> [B, L, H * Dv]"""
    batch, _, new, _ = heads.shape
    return heads.swapaxes(1, 2).reshape(batch, new, -1)
