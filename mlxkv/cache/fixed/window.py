"""The form of `WindowedKVCache`: that of `CompressedKVCache`, of which only the last tokens are seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from mlxkv.cache.fixed.form import NotYet, Numbers, StandIn, Untraceable
from mlxkv.cache.fixed.own import Own, OwnStandIn
from mlxkv.cache.rotating import WindowedKVCache


class OwnWindow(Own):
    """Numbers as of `Own`; those of pages count the pages that are still there. A page leaves between two steps, as
    one is sealed."""

    def __init__(self, cache: WindowedKVCache, new: int):
        if cache.keep:
            raise Untraceable("a sink beside a sliding window")
        if new > 1:
            raise NotYet("several tokens at once in a sliding window")
        super().__init__(cache, new)
        self.size = cache.max_size
        self.key = *self.key, self.size
        self.lockstep = *self.lockstep, self.size

    def standing_in(self, arrays: Sequence[mx.array], numbers: Numbers) -> StandIn:
        return _WindowStandIn(self, arrays, numbers)


class _WindowStandIn(OwnStandIn):
    def __init__(self, form: OwnWindow, arrays: Sequence[mx.array], numbers: Numbers):
        super().__init__(form, arrays, numbers)
        self._size = form.size

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        view, _ = super().update_and_fetch(keys, values)
        self._view = replace(view, window=self._size)
        return self._view, self._view

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        if N == 1 and (window_size is None or window_size >= self._size):
            return None  # attention knows the window
        raise Untraceable("a window that is shorter than its cache")

    def _seen(self, new: int) -> mx.array:
        pages, live = self._pages.tokens, self._live[0].shape[2]

        def make() -> mx.array:
            columns, numbers = mx.arange(pages + live), self._numbers.array
            in_pages = columns < pages
            place = mx.where(in_pages, columns, columns - pages + numbers[2])
            last = numbers[2] + numbers[1]
            used = mx.where(in_pages, columns < numbers[2], place <= last)
            return (used & (place > last - self._size))[None, None, None]

        return self._numbers.once(("seen", pages, live, self._size), make)
