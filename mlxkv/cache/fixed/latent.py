"""The forms of `LatentKVCache`, alone and in a batch: as those of `CompressedKVCache`, and the rotary keys that the
model's code multiplies."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxkv.cache.fixed.batch import Rows, RowsStandIn, check_rows
from mlxkv.cache.fixed.form import Form, NotYet, Numbers, Untraceable
from mlxkv.cache.fixed.own import Own, OwnStandIn
from mlxkv.cache.latent.batch import BatchedLatentCache
from mlxkv.cache.latent.own import LatentKVCache
from mlxkv.cache.view import TracedLatents, View


class OwnLatents(Own):
    """Numbers as of `Own`. Exact rotary keys are one more array, in the order of their tokens."""

    def __init__(self, cache: LatentKVCache, new: int):
        if new > 1:
            raise NotYet("several tokens at once make keys and values of every head")
        super().__init__(cache, new)
        self.rotary = cache.whole_rotary
        if self.rotary is not None:
            self.arrays, self.writes = [*self.arrays, self.rotary], 3

    def standing_in(self, arrays: Sequence[mx.array], numbers: Numbers) -> _LatentStandIn:
        return _LatentStandIn(self, arrays, numbers)


class _LatentStandIn(OwnStandIn):
    def __init__(self, form: OwnLatents, arrays: Sequence[mx.array], numbers: Numbers):
        self._rotary = None if form.rotary is None else arrays[-1]
        super().__init__(form, arrays if self._rotary is None else arrays[:-1], numbers)

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        """Latents as a view, and the rotary keys of all tokens with room behind them."""
        self._write(keys, values, 1)
        latents, live = self.written
        if in_order := self._rotary is not None:
            at = self._numbers.places(0, values.shape)
            turned = mx.put_along_axis(self._rotary, at, values.astype(live.dtype), axis=2)
            self.written = latents, live, turned
        else:
            parts = [] if self._sink is None else [self._sink[1]]
            turned = mx.concatenate([*parts, self._pages.decode_rotary(live.dtype), live], axis=2)
        sink = self._sink and (self._sink[0],) * 2
        numbers = self._numbers
        counts = numbers.once("counts", lambda: numbers.array[2:5])
        self._view = TracedLatents(
            *((latents,) * 2, sink, self._pages),
            seen=self._seen,
            counts=counts,
            width=turned.shape[2],
            in_order=in_order,
            once=numbers.once,
        )
        return self._view, turned

    def keys_and_values(self):
        raise Untraceable("layers share a cache of latents")

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """None: one token sees all, whether an array is asked for or not."""
        if N > 1 or window_size is not None:
            return super().make_mask(N, return_array, window_size)
        return None


def of_latent_batch(cache: BatchedLatentCache, new: int) -> Form:
    """The form of a batch of sequences, which are read one after the other. Raises NotYet while prompts are read."""
    if cache.is_padded:
        raise NotYet("prompts of unequal lengths are read")
    check_rows(cache.rows, LatentKVCache)
    return LatentRows(cache, new)


class LatentRows(Rows):
    """Arrays of `OwnLatents` for each sequence."""

    own = OwnLatents

    def standing_in(self, arrays: Sequence[mx.array], numbers: Numbers) -> _LatentRowsStandIn:
        return _LatentRowsStandIn(self.forms, arrays, numbers)


class _LatentRowsStandIn(RowsStandIn):
    def update_and_fetch(self, keys: mx.array, values: mx.array):
        """Latents as views, and the rotary keys of all sequences [B, 1, columns, N], with zeros behind the shorter."""
        if self.written is not None:
            raise Untraceable("a layer writes to its cache twice")
        views, turned = zip(*self.each(keys, values), strict=True)
        most = max(x.shape[2] for x in turned)
        spare = ([(0, 0), (0, 0), (0, most - x.shape[2]), (0, 0)] for x in turned)
        turned = mx.concatenate([mx.pad(x, room) for x, room in zip(turned, spare, strict=True)])
        return View(views[0].live, rows=tuple((view, None) for view in views)), turned

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """As of one sequence: what is not in use is out of sight (`TracedLatents`)."""
        if N > 1 or window_size is not None:
            return super().make_mask(N, return_array, window_size)
        return None
