"""The form of `CompressedKVCache`: its pages as they are, its live window in buffers of fixed room."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.fixed.form import Form, NotYet, Numbers, StandIn
from mlxkv.cache.stores import Records
from mlxkv.cache.view import View
from mlxkv.codec.transform import left
from mlxkv.formats.records import TOKENS
from mlxkv.metal.lengths import Division, Later


class Own(Form):
    """Numbers: offset, live tokens before, then, of each sequence, records, sink tokens, live tokens
    after, first record; in place of the records of plain ops, their tokens.

    writes: how many of its arrays, from the first on, a step writes.
    """

    writes = 2

    def __init__(self, cache: CompressedKVCache, new: int):
        if (live := cache.windows) is None:
            raise NotYet("nothing is sealed yet")
        self.cache, self.new, self.store = cache, new, cache.store
        sink, config, pages = cache.sink, cache.config, self.store.pages
        self.n_sink = config.sink if sink else 0
        self.seals = cache.count + new > config.room(sink is not None)
        self.centre = cache.centre
        self.key = self.store.form, self.n_sink, self.centre
        shape = live[0].shape[:2]
        self.lockstep = type(self.store), shape, config.page, config.recent, self.n_sink
        self.state = cache.offset, cache.count, pages.counts[0]
        self.arrays = [*live, *(sink or ()), *pages.arrays.values()]
        self.emulated = self.store.emulated

    @property
    def numbers(self) -> tuple[int, ...]:
        (offset, count, pages), batch = self.state, 1
        stored, step = pages * self.cache.config.page, 0
        if isinstance(self.store, Records):
            batch, heads, room, _ = self.store.pages.arrays["records"].shape
            stored, step = stored // TOKENS, heads * room
        rows = ((stored, self.n_sink, count + self.new, i * step) for i in range(batch))
        return offset, count, *(n for row in rows for n in row)

    @property
    def advance(self) -> tuple[int, ...]:
        new, batch = self.new, self.cache.windows[0].shape[0]
        rows = batch if isinstance(self.store, Records) else 1
        return new, new, *(0, 0, new, 0) * rows

    def standing_in(self, arrays: Sequence[mx.array], numbers: Numbers) -> StandIn:
        return OwnStandIn(self, arrays, numbers)

    def commit(self, written: Sequence[mx.array]) -> None:
        self.cache.written(tuple(written), self.new)


class OwnStandIn(StandIn):
    def __init__(self, form: Own, arrays: Sequence[mx.array], numbers: Numbers):
        self._numbers, self._live, self._centre = numbers, tuple(arrays[:2]), form.centre
        rest = 4 if form.n_sink else 2
        self._sink = tuple(arrays[2:rest]) or None
        self._pages = form.store.room(arrays[rest:])
        self._division = Division(self._pages.tokens // TOKENS)
        self._view: View | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        self._write(left(self._centre, keys), values, 1)
        lengths = self._numbers.once(
            ("lengths", self._division), lambda: Later(self._numbers.array[2:], self._division)
        )
        self._view = View(self.written, self._sink, self._pages, lengths=lengths, seen=self._seen)
        return self._view, self._view

    def keys_and_values(self):
        self.shared = True
        return self._view, self._view

    def _seen(self, new: int) -> mx.array:
        sink = self._sink[0].shape[2] if self._sink else 0
        pages, live = self._pages.tokens, self._live[0].shape[2]
        return self._numbers.once(
            ("seen", sink, pages, live, new),
            lambda: _columns(sink, pages, live, new, self._numbers.array),
        )


def _columns(sink: int, pages: int, live: int, new: int, numbers: mx.array) -> mx.array:
    """[1, 1, L, sink + pages + live] bool: what each new token sees, with rooms of so many tokens."""
    in_pages = mx.arange(pages) < numbers[2]
    in_live = mx.arange(live)[None] <= numbers[1] + mx.arange(new)[:, None]
    before = mx.concatenate([mx.ones((sink,), mx.bool_), in_pages])
    before = mx.broadcast_to(before[None], (new, sink + pages))
    return mx.concatenate([before, in_live], axis=1)[None, None]
