"""Families of mlx-lm whose files compute attention by code of their own: what is rebound in them, so that
the code meets our views.

A view in which nothing is sealed gives its arrays to the family's own code: results stay equal, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import ModuleType

import mlx.core as mx

from mlxkv.cache.attention import attend
from mlxkv.cache.view import CacheView, View
from mlxkv.errors import UserError
from mlxkv.models.hooks.probe import Handle
from mlxkv.models.hooks.taps import ObservedView

Wrap = Callable[[Callable], Callable]


def is_plain(view: CacheView) -> bool:
    """Return whether nothing is sealed, so that its arrays are those of a plain cache, and nobody observes it."""
    return isinstance(view, View) and view.plain and not isinstance(view, ObservedView)


# -- mx functions of a file (plamo, plamo2)


@dataclass(frozen=True)
class Tiled:
    """What `mx.tile(keys, [1, count, 1, 1])` returns for a view or a handle: query head h reads kv head
    h % G, where a view's query heads of one kv head stand side by side."""

    held: CacheView | Handle
    count: int

    def attended(
        self,
        attention: Callable,
        queries,
        values: Tiled,
        cache=None,
        scale=1.0,
        mask=None,
        sinks=None,
    ) -> mx.array:
        """queries: [B, H, L, D] -> [B, H, L, Dv]. attention: over views."""
        view, rest = self.held, {"scale": scale, "mask": mask, "sinks": sinks}
        if type(view) is not Handle and is_plain(view):
            arrays = (mx.tile(x, (1, self.count, 1, 1)) for x in view.live)
            return mx.fast.scaled_dot_product_attention(queries, *arrays, **rest)
        out = attention(_regrouped(queries, self.count), view, values.held, **rest)
        return _regrouped(out, out.shape[1] // self.count)


def _regrouped(x: mx.array, count: int) -> mx.array:
    """[B, count * n, L, D]: head i n + j goes to j count + i."""
    batch, heads, new, dims = x.shape
    return x.reshape(batch, count, heads // count, new, dims).swapaxes(1, 2).reshape(x.shape)


class _Functions(ModuleType):
    """`mlx.core`, or `mlx.core.fast`, with some functions in place of its own."""

    def __init__(self, of: ModuleType, **own):
        super().__init__(of.__name__, of.__doc__)
        vars(self).update(own, _of=of)

    def __getattr__(self, name: str):
        return getattr(vars(self)["_of"], name)


def functions(through: Wrap) -> Wrap:
    """Wrap a file's `mx`: attention over our views goes `through`, and views can be tiled."""

    def wrap(original: ModuleType) -> ModuleType:
        attention = through(original.fast.scaled_dot_product_attention)

        def scaled_dot_product_attention(queries, keys, values, **rest):
            if isinstance(keys, Tiled):
                return keys.attended(attention, queries, values, **rest)
            return attention(queries, keys, values, **rest)

        def tile(x, reps, **rest):
            if not isinstance(x, (CacheView, Handle)):
                return original.tile(x, reps, **rest)
            if len(reps) != 4 or [*reps[:1], *reps[2:]] != [1, 1, 1]:
                raise UserError(f"[attach] compressed keys are tiled along heads alone; got {reps}")
            return Tiled(x, reps[1])

        fast = _Functions(original.fast, scaled_dot_product_attention=scaled_dot_product_attention)
        return _Functions(original, fast=fast, tile=tile)

    return wrap


def tiled(through: Wrap) -> Wrap:
    """Wrap a file's `scaled_dot_product_attention`, which is also given what `tile` returned."""

    def wrap(original: Callable) -> Callable:
        attention = through(original)

        @wraps(original)
        def scaled_dot_product_attention(queries, keys, values, *args, **kwargs):
            if isinstance(keys, Tiled):
                return keys.attended(attention, queries, values, *args, **kwargs)
            return attention(queries, keys, values, *args, **kwargs)

        return scaled_dot_product_attention

    return wrap


# -- capped scores (gear, gemma2)


def capped(original: Callable) -> Callable:
    """Wrap gear's attention with capped scores."""

    @wraps(original)
    def _softcap_attention(queries, keys, values, scale, softcap, mask):
        if not isinstance(keys, (CacheView, Handle)):
            return original(queries, keys, values, scale, softcap, mask)
        if is_plain(keys):
            return original(queries, *keys.live, scale, softcap, mask)
        return _capped(queries, keys, scale, mask, softcap)

    return _softcap_attention


def gemma2(original: Callable) -> Callable:
    """Wrap gemma2's attention, which is one method: over our caches it goes on here behind the projections
    and the positions."""

    @wraps(original)
    def __call__(self, x, mask=None, cache=None):
        if not type(cache).__module__.startswith("mlxkv."):
            return original(self, x, mask, cache)
        offset = cache.offset
        q, k, v = (
            linear(x).reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)
            for linear, heads in (
                (self.q_proj, self.n_heads),
                (self.k_proj, self.n_kv_heads),
                (self.v_proj, self.n_kv_heads),
            )
        )
        q, k = (self.rope(one, offset=offset) for one in (q, k))
        view, values = cache.update_and_fetch(k, v)
        if not isinstance(view, (CacheView, Handle)):  # of a cache that hands keys back
            return original(self, x, mask, _Updated(offset, (view, values)))
        if is_plain(view):
            return original(self, x, mask, _Updated(offset, view.live))
        out = _capped(q, view, self.scale, mask, self.attn_logit_softcapping)
        return self.o_proj(out.swapaxes(1, 2).reshape(*x.shape[:2], -1))

    return __call__


@dataclass(frozen=True)
class _Updated:
    """Stands for a cache that has been updated already. offset: before that. pair: all keys and values."""

    offset: int
    pair: tuple[mx.array, mx.array]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self.pair


def _capped(queries, keys: CacheView | Handle, scale, mask, softcap: float) -> mx.array:
    if type(keys) is Handle:
        return keys.attended(queries, keys, softcap=softcap)
    if isinstance(keys, ObservedView):
        return keys.attended(queries, keys, scale=scale, mask=mask, softcap=softcap)
    return attend(queries, keys, scale, mask, softcap=softcap)


# -- block-sparse attention (phi3small)


def block_sparse(original: Callable) -> Callable:
    """Wrap the block-sparse attention of phi3small: its mask of blocks, of each query head, goes to our
    attention as an additive one."""

    @wraps(original)
    def _block_sparse_attention(self, queries, keys, values, scale, mask):
        if type(keys) is Handle:
            return keys.attended(queries, values)
        if not isinstance(keys, CacheView):
            return original(self, queries, keys, values, scale, mask)
        if is_plain(keys):
            return original(self, queries, *keys.live, scale, mask)
        heads, new = queries.shape[1:3]
        if not keys.batched:
            seen = _blocks(self, heads, new, keys.shape[2], mask)
            if isinstance(keys, ObservedView):
                return keys.attended(queries, keys, scale=scale, mask=seen)
            return attend(queries, keys, scale, seen)
        rows = []
        for i, row in enumerate(keys.rows):
            one, n = (None, 0) if row is None else (row[0], new if row[1] is None else row[1])
            if not n:
                rows.append(mx.zeros((1, heads, new, keys.tokens)))
                continue
            part = mask
            if mask is not None:
                part = mask[min(i, mask.shape[0] - 1)][None, :, :n, : one.tokens]
            seen = _blocks(self, heads, n, one.tokens, part)
            room = (0, new - n), (0, keys.tokens - one.tokens)
            rows.append(mx.pad(seen, [(0, 0), (0, 0), *room]))
        return attend(queries, keys, scale, mx.concatenate(rows))

    return _block_sparse_attention


def _blocks(layer, heads: int, new: int, total: int, mask: mx.array | None) -> mx.array:
    """Return what the layer adds to scores: [1, H, L, T] float32."""
    _, dense = layer._block_sparse_mask(new, total)
    added = mx.where(dense, 0.0, -mx.inf).reshape(1, heads, new, total)
    return added if mask is None else added + mask.astype(mx.float32)
