"""`AdaptiveKVCache`: a compressed cache that observes the queries (`mlxkv.formats.rules.observing` says what for)."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from mlxkv.cache import choose, low_rank
from mlxkv.cache.attention import DECODE_TOKENS, masked, scorer
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.low_rank import Segments
from mlxkv.cache.view import Pair, View
from mlxkv.codec.codec import Stored
from mlxkv.codec.maps import LayerMaps
from mlxkv.errors import UserError
from mlxkv.formats.rules.observing import BLOCK, POOL, Observing

# -- how much attention the last queries of a prompt pay to each token: which tokens teach a basis (OjaKV,
# section 5.2), which stay (SnapKV). Spec: `spec.oja`


def importance(
    queries: mx.array, view: View, scale: float, mask: mx.array | None = None
) -> mx.array:
    """[B, G, T] float32: the softmax scores of queries [B, H, w, D], which are those of the last tokens,
    summed over them and over the heads of a kv head. mask: of these queries; None: causal."""
    batch, heads, new, dims = queries.shape
    kv_heads, total = view.live[0].shape[1], view.tokens
    if mask is None:
        mask = mx.arange(total - new, total)[:, None] >= mx.arange(total)[None]
    q = (queries.astype(mx.float32) * scale).reshape(batch, kv_heads, -1, new, dims)
    out, score = 0.0, scorer(view)
    for start in range(0, new, BLOCK):  # the scores of all at once would be large
        part = slice(start, min(start + BLOCK, new))
        s = score(q[..., part, :].flatten(2, 3)).reshape(batch, heads, -1, total)
        rows = mask[..., part, :] if mask.shape[-2] > 1 else mask
        p = mx.softmax(masked(s, rows), axis=-1, precise=True)
        out = out + p.reshape(batch, kv_heads, -1, total).sum(2)
    return out


def salient(importance: mx.array, count: int) -> mx.array:
    """importance [B, G, T] -> [B, count] positions, ascending, of the tokens of most importance for all
    heads together."""
    return mx.sort(_largest(importance.sum(1), count), axis=-1)


def taken(x: mx.array, at: mx.array) -> mx.array:
    """x: [B, G, T, D], at: [B, N] -> [B, G, N, D]."""
    return mx.take_along_axis(x, at[:, None, :, None], axis=2)


def votes(importance: mx.array, pool: int = POOL) -> mx.array:
    """[B, G, T]: the largest importance among `pool` neighbours."""
    near = pool // 2
    padded = mx.pad(importance, [(0, 0), (0, 0), (near, near)], constant_values=-mx.inf)
    total = importance.shape[-1]
    out = importance
    for shift in range(pool):
        out = mx.maximum(out, padded[..., shift : shift + total])
    return out


def kept(votes: mx.array, count: int) -> mx.array:
    """[B, G, count] positions, ascending, of the largest votes [B, G, T]."""
    return mx.sort(_largest(votes, count), axis=-1)


def kept_pages(votes: mx.array, page: int, count: int) -> mx.array:
    """[B, G, count] pages, ascending, the same for all kv heads, by the votes of all their tokens."""
    batch, heads, total = votes.shape
    by_page = votes.reshape(batch, heads, total // page, page).sum((1, 3))
    chosen = mx.sort(_largest(by_page, count), axis=-1)
    return mx.broadcast_to(chosen[:, None], (batch, heads, count))


def _largest(x: mx.array, count: int) -> mx.array:
    """Positions of the `count` largest; of equal ones the earlier (the sort is stable)."""
    return mx.argsort(-x, axis=-1)[..., :count]


class AdaptiveKVCache(Observing, CompressedKVCache):
    """As CompressedKVCache, for every `config`."""

    observes = True
    importance, salient, taken = map(staticmethod, (importance, salient, taken))
    votes, kept, kept_pages = map(staticmethod, (votes, kept, kept_pages))

    def _clear(self) -> None:
        super()._clear()
        self._start()

    @property
    def basis(self) -> LayerMaps | None:
        """The basis of the next page."""
        return self._now or self.layer_maps

    def _new_store(self, dims: tuple[int, int], dtype: mx.Dtype):
        if not self.config.listens:
            return super()._new_store(dims, dtype)
        plan = self.plan(dims, dtype)
        make = partial(choose.store, plan, way=self.way)
        rule = self.config.rule
        return Segments(make, self.layer_maps, self.basis, self.config.page, rule)

    # -- reading and writing

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[View, View]:
        if not self.config.listens:
            return super().update_and_fetch(keys, values)
        self._seal_rest()
        if keys.shape[2] <= DECODE_TOKENS:
            self._keep()
            self._pin()
            self._learn()
            self._since += keys.shape[2]
            return super().update_and_fetch(keys, values)
        new = self._behind_live(keys, values)
        self._live, self._count = new, new[0].shape[2]
        self.offset += keys.shape[2]
        self._since = 0
        pages = self._store.whole() if self._count_pages else None
        view = View(new, self._sink, pages, plain=pages is None, observer=self._attended)
        self._pending, self._chunk = view, keys.shape[2]
        return view, view

    def _attended(self, queries: mx.array, out: mx.array, scale: float, mask) -> mx.array:
        """Called by attention over the last chunk with its queries, [B, H, L, D], and its output. Returns
        the output, which is then computed together with what it changes here."""
        array = isinstance(mask, mx.array)
        if not self._observe(queries, scale, lambda n: mask[..., -n:, :] if array else None):
            return out
        return mx.depends(out, list(self.arrays()))

    def _joined(self, first: mx.array, second: mx.array) -> mx.array:
        return mx.concatenate([first, second], axis=2)

    def _taught(self, batch: Pair, prompt: bool) -> LayerMaps:
        return low_rank.taught(self.basis, self.config, batch, prompt, batch[0].shape[:2])

    def view(self) -> View:
        """Return what attention reads, without appending anything."""
        return self.keys_and_values()[0]

    def _saved(self, basis: LayerMaps) -> Stored:
        return low_rank.saved(basis)

    def _loaded(self, arrays: Stored) -> LayerMaps | None:
        return low_rank.loaded(self.layer_maps, arrays)

    # -- the rest of mlx-lm's contract

    def is_trimmable(self) -> bool:
        """False where tokens of a prompt are dropped or moved once it is read: a host that asks now may trim
        into it later."""
        return self.config.keep == 1 and not self.config.pinned

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        moved = self.dropped or self.pinned
        if not moved or (window_size is None and not return_array):
            return super().make_mask(N, return_array, window_size)
        if window_size is not None:
            raise UserError(
                "[--kv] token selection and pinned tokens need layers that see the whole context; got a "
                f"mask with a window of {window_size}; choose a preset without +keep and +pinned"
            )
        self.offset -= self.dropped
        try:
            return super().make_mask(N, return_array, window_size)
        finally:
            self.offset += self.dropped

    def arrays(self) -> tuple[mx.array, ...]:
        return (*super().arrays(), *self._own_arrays())
