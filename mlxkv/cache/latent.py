"""`LatentKVCache`: the compressed cache of a layer with multi-head latent attention (MLA).

mlx-lm passes a cache the latents [B, 1, L, R] as keys, and the rotary keys [B, 1, L, N], shared by all heads, as
values. A latent is both key and value, so it is stored once. Rotary keys stay an array in full precision, or those in
pages are stored with 8 bits (`CacheConfig.rotary`) and returned as an array: the model multiplies them itself and adds
the product to the scores.
Spec: `spec.affine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from mlxkv.cache.attention import DECODE_TOKENS, whole_side
from mlxkv.cache.backends import PLAIN_OPS
from mlxkv.cache.batch import BatchedKVCache
from mlxkv.cache.batch_buffers import padded
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.contract import BatchMethod
from mlxkv.cache.static import Arrays, CompressedStaticCache, NotYet, StepIndices
from mlxkv.cache.stores import LatentCodes
from mlxkv.cache.view import LatentPages, Pair, RowsView, TracedLatents, View
from mlxkv.formats.rules.windows import TrimPlan
from mlxkv.formats.sizes import buffer_tokens
from mlxkv.formats.state import check_batch
from mlxkv.metal.launch import ahead, begin, device_type

# -- `BatchedLatentCache`: the latents of several sequences as one cache, for mlx-lm's batches.
#
# Each sequence has a separate cache. The model multiplies the rotary keys of all at once, so they are returned as one
# array, in which shorter sequences are padded with zeros; scores over these are not read.


class BatchedLatentCache(BatchedKVCache):
    """The latent caches of one layer, one per sequence."""

    rows: list[LatentKVCache]

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        """Call `LatentKVCache.update_and_fetch` for every sequence, without the padding.

        Returns latents as a view or an array [B, 1, T, R], and rotary keys [B, 1, T, N].
        """
        check_batch(self.batch_size, keys.shape[0], "BatchedLatentCache")
        new, tokens = keys.shape[2], self.size()
        expands, latents, rotary = new > 1, [], []
        for i, (row, n) in enumerate(zip(self.rows, self._unpadded(new), strict=True)):
            if n:
                parts = row.append(keys[i : i + 1, :, :n], values[i : i + 1, :, :n], expands)
                latents.append(parts[0] if expands else (parts[0], n))
                rotary.append(parts[1])
            else:  # padding, which attention does not read
                latents.append(keys[:1, :, :0] if expands else None)
                rotary.append(values[:1, :, :0])
        width = tokens + new if expands else self.size()  # width of the mask, or of the longest
        rotary = mx.concatenate([padded(x, width) for x in rotary])
        if not expands:
            recent = next(row[0].recent for row in latents if row is not None)
            return RowsView(recent, rows=tuple(latents)), rotary
        return mx.concatenate([padded(x, width) for x in latents]), rotary

    @staticmethod
    def joined(views: Sequence[tuple]) -> tuple:
        """Return latents as views, and the rotary keys of all sequences [B, 1, columns, N], padded with zeros."""
        columns = max(rotary.shape[2] for _, rotary in views)
        rotary = mx.concatenate([padded(x, columns) for _, x in views])
        return BatchedKVCache.joined(views)[0], rotary

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """Return the mask of BatchedKVCache; for several tokens an array, which plain attention needs."""
        return super().make_mask(N, return_array or N > 1, window_size)


class LatentKVCache(CompressedKVCache):
    """A CompressedKVCache with a config from `CacheConfig.of_latents`: keys are latents, values rotary keys.

    selects: whether the model's code selects single latents, and so needs them as an array.
    """

    latent = True
    shares_buffers = False
    selects = False

    def _forget(self) -> None:
        super()._forget()
        self._rotary: mx.array | None = None  # a buffer of the rotary keys of all tokens

    # -- reading and writing

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[View | mx.array, mx.array]:
        """Append latents [B, 1, L, R] and rotary keys [B, 1, L, N] and return all of both.

        Latents: for one new token a view, for attention with absorbed queries; for several an array [B, 1, T, R],
        from which the model's code computes keys and values.
        """
        return self.append(keys, values, keys.shape[2] > 1)

    def append(
        self, latents: mx.array, rotary: mx.array, expands: bool
    ) -> tuple[View | mx.array, mx.array]:
        """Implement `update_and_fetch`. expands: return latents as an array."""
        exact = self.config.rotary == 16
        held = self._recent
        # Otherwise `_update` refuses.
        if exact and (held is None or rotary.shape[:2] == held[1].shape[:2]):
            self._write(rotary)
        view, rotary_keys = self._update(latents, rotary)
        if isinstance(rotary_keys, View):  # pages were quantized
            rotary_keys = self.rotary if exact else _rotary_of(rotary_keys)
        assert rotary_keys is not None  # there are tokens now
        view = _as_latents(view)
        if latents.shape[2] > DECODE_TOKENS and device_type() != "cpu":
            ahead(self.arrays())
        return (decoded(view) if expands or self.selects else view), rotary_keys

    def keys_and_values(self) -> tuple[View, mx.array | None]:
        """Return the view and the rotary keys, without appending anything."""
        return _as_latents(super().keys_and_values()[0]), self.rotary

    @property
    def rotary(self) -> mx.array | None:
        """The rotary keys of all tokens [B, 1, T, N], or None before there are some."""
        if self.config.rotary < 16:
            return None if self.empty() else _rotary_of(super().keys_and_values()[0])
        return None if self._rotary is None else self._rotary[:, :, : self.offset]

    def _write(self, rotary: mx.array) -> None:
        """Append the rotary keys of new tokens to the `offset` keys in the buffer."""
        end, old = self.offset + rotary.shape[2], self._rotary
        if old is None or end > old.shape[2]:
            capacity = buffer_tokens(self.offset, end)
            buffer = mx.zeros((*rotary.shape[:2], capacity, rotary.shape[3]), rotary.dtype)
            if old is not None and self.offset:
                buffer[:, :, : self.offset] = old[:, :, : self.offset]
            self._rotary = old = buffer
        old[:, :, self.offset : end] = rotary

    # -- a step of fixed shapes (`cache.static`)

    @property
    def whole_rotary(self) -> mx.array | None:
        """Return the buffer of exact rotary keys, with the capacity of windows and pages; None if stored with 8 bits.

        Call it after `windows`.
        """
        if self.config.rotary < 16:
            return None
        store, recent, rotary = self.store, self._recent, self._rotary
        assert store is not None and recent is not None and rotary is not None
        capacity = self._sunk + store.pages.capacity * self.config.page + recent[0].shape[2]
        if rotary.shape[2] != capacity:
            keys = rotary[:, :, : self.offset]
            spare = [(0, 0), (0, 0), (0, capacity - self.offset), (0, 0)]
            self._rotary = mx.pad(keys, spare)
        return self._rotary

    def commit(self, arrays: Sequence[mx.array], new: int) -> None:
        """Commit as CompressedKVCache does; a third array is the buffer of rotary keys."""
        if len(arrays) > 2:
            self._rotary = arrays[2]
        super().commit(arrays, new)

    def page_store(self, dims: tuple[int, int], dtype: mx.Dtype) -> LatentCodes:
        backend = PLAIN_OPS if self.selects else self.plan(dims, dtype).backend
        return LatentCodes(self._stored, dims, self.layer_maps, backend)

    # -- the rest of mlx-lm's contract

    def _decoded(self, page: int, count: int) -> Pair:
        pages, (latents, rotary) = self._existing_store.read(page, page + 1), self._existing_recent
        rotary_keys, first = self._rotary, self._sunk + page * self.config.page
        if rotary_keys is None:  # of those that are stored with codes
            assert isinstance(pages, LatentPages)
            rotary_keys, first = pages.decode_rotary(rotary.dtype), 0
        pair = (
            pages.decode(0, latents.dtype)[:, :, :count],
            rotary_keys[:, :, first : first + count],
        )
        begin(pair)
        return pair

    def _trim(self, plan: TrimPlan) -> None:
        rotary = self._rotary
        super()._trim(plan)
        self._rotary = rotary if self.offset else None

    def transform_values(self, folded: bool) -> None:
        """Do nothing: weights do not transform values of latents."""

    def arrays(self) -> tuple[mx.array, ...]:
        return super().arrays() + (() if self._rotary is None else (self._rotary,))

    def _extra(self) -> tuple[dict, dict]:
        """Return the rotary keys of the tokens in pages; windows contain theirs."""
        if not self._paged or self._rotary is None:
            return {}, {}
        return {}, {"rotary": self._rotary[:, :, self._sunk : self._sunk + self._paged]}

    def _restore(self, header: dict, tree: dict) -> None:
        super()._restore(header, tree)
        if self.config.rotary < 16:
            return
        parts = [self.sink and self.sink[1], self._paged and tree["rotary"]]
        parts = [x for x in parts if isinstance(x, mx.array)]
        if self._recent is not None:
            parts.append(self._read_recent()[1])
        keys = mx.concatenate(parts, axis=2) if parts else None
        if keys is not None and keys.shape[2] != self.offset:
            raise ValueError(f"rotary keys of {keys.shape[2]} tokens")
        self._rotary = keys

    @property
    def keys(self) -> mx.array:
        """The recent latents, since mlx-lm makes other computations depend on a cache's arrays."""
        return self._existing_recent[0]

    @keys.setter
    def keys(self, latents: mx.array) -> None:
        self._recent = latents, self._existing_recent[1]

    @BatchMethod
    def merge(cls, caches: list[LatentKVCache]) -> BatchedLatentCache:
        """Sequences as one batch (mlx-lm's BatchGenerator)."""
        return BatchedLatentCache.merge(caches)


class IndexedLatentKVCache(LatentKVCache):
    """A LatentKVCache for models whose sparse index selects tokens (DeepSeek-V3.2): returns latents as an array."""

    selects = True


def _as_latents(view: View) -> View:
    """Return a view whose windows contain only latents, as keys and as values."""
    recent, sink = view.recent[0], view.sink and (view.sink[0], view.sink[0])
    return replace(view, recent=(recent, recent), sink=sink, buffers=None)


def _rotary_of(view: View) -> mx.array:
    """Return the rotary keys of all tokens [B, 1, T, N], decoding those in pages. view: latents and rotary keys."""
    recent = view.recent[1]
    parts = [view.sink[1]] if view.sink is not None else []
    if isinstance(view.pages, LatentPages):
        parts.append(view.pages.decode_rotary(recent.dtype))
    return mx.concatenate([*parts, recent], axis=2) if parts else recent


def decoded(view: View) -> mx.array:
    """Return all latents as attention sees them, [B, 1, T, R]."""
    latents = whole_side(view, 0, view.dtype)
    return mx.depends(latents, list(view.quantized)) if view.quantized else latents


class LatentStaticCache(CompressedStaticCache):
    """A `LatentKVCache`. Exact rotary keys are one more array, in the order of their tokens."""

    def __init__(self, cache: LatentKVCache, new: int):
        if new > 1:
            raise NotYet("several tokens at once make keys and values of every head")
        super().__init__(cache, new)
        self.rotary = cache.whole_rotary
        if self.rotary is not None:
            self.arrays = [*self.arrays, self.rotary]

    def append(
        self, arrays: Arrays, indices: StepIndices, keys: mx.array, values: mx.array
    ) -> tuple[Arrays, tuple]:
        """Return latents as a view, and the rotary keys of all tokens with slack."""
        exact = self.rotary is not None
        buffers, (view, _) = super().append(arrays[:-1] if exact else arrays, indices, keys, values)
        recent = buffers[1]
        if exact:
            at = indices.places(0, values.shape)
            rotary = mx.put_along_axis(arrays[-1], at, values.astype(recent.dtype), axis=2)
            buffers = *buffers, rotary
        else:
            parts = [] if view.sink is None else [view.sink[1]]
            rotary = mx.concatenate(
                [*parts, view.pages.decode_rotary(recent.dtype), recent], axis=2
            )
        view = _as_latents(view)
        latents = TracedLatents(
            *(view.recent, view.sink, view.pages),
            seen=view.seen,
            counts=indices.once("counts", lambda: indices.array[2:5]),
            width=rotary.shape[2],
            in_order=exact,
            once=indices.once,
        )
        return buffers, (latents, rotary)

    def make_mask(self, N: int, return_array: bool, window_size: int | None):
        """Return None: one token sees all, even if an array is requested; what is not in use is out of sight."""
        return super().make_mask(N, return_array and N > 1, window_size)
