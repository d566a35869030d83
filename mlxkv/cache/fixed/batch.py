"""The forms of `BatchedKVCache`: sequences in shared arrays, for kernels, or one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx

from mlxkv.cache.batch import BatchedKVCache
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.fixed.form import Form, NotYet, Numbers, StandIn, Untraceable, put
from mlxkv.cache.fixed.own import Own
from mlxkv.cache.view import View
from mlxkv.codec.transform import left
from mlxkv.metal.lengths import Later, shared


def of_batch(cache: BatchedKVCache, new: int) -> Form:
    """The form of a batch. Raises NotYet while prompts are read, and where the next step joins sequences."""
    if cache.is_padded:
        raise NotYet("prompts of unequal lengths are read")
    if cache.ragged is not None:
        return Together(cache, new)
    rows = cache.rows
    check_rows(rows, CompressedKVCache)
    if len(rows) > 1 and all(row.joins for row in rows):
        raise NotYet("the sequences are about to join")
    return Rows(cache, new)


def check_rows(rows: Sequence[CompressedKVCache], kind: type[CompressedKVCache]) -> None:
    """Raises Untraceable for sequences in caches of another class, NotYet where one has no pages."""
    if any(type(row) is not kind for row in rows):
        raise Untraceable(f"no fixed form of {type(rows[0]).__name__} in a batch")
    if not all(row.store is not None and row.store.count for row in rows):
        raise NotYet("nothing is sealed yet")


class Together(Form):
    """Build the form of sequences in shared arrays. Numbers, with one of each for every sequence: offsets, live tokens
    before, then records, sink tokens, live tokens after, and first record of one sequence after the other."""

    def __init__(self, cache: BatchedKVCache, new: int):
        self.cache, self.new, self.ragged = cache, new, cache.ragged
        ragged = self.ragged
        ragged.settle()
        store, config = ragged.store, ragged.config
        self.batch, pages = len(ragged.counts), ragged.pages
        self.division = shared(tuple(n * ragged.each for n in pages.counts))
        self.has_sink = ragged.sink is not None
        self.seals = ragged.seals_after(new)
        self.emulated = store.emulated
        self.key = Together, store.form, self.division, self.has_sink, ragged.centre
        self.lockstep = Together, config.page, config.recent, config.sink
        state = ragged.offsets, ragged.counts, ragged.parted, pages.counts, pages.starts
        self.state = tuple(map(tuple, state))
        self.arrays = [*ragged.live, *(ragged.sink or ()), *pages.arrays.values()]
        self.advance = (new,) * (2 * self.batch) + (0, 0, new, 0) * self.batch

    @property
    def numbers(self) -> tuple[int, ...]:
        rows = [*self.ragged.offsets, *self.ragged.counts]
        for at, (records, sink, live) in zip(*self.ragged.lengths, strict=True):
            rows += records, sink, live + self.new, at
        return tuple(rows)

    def standing_in(self, arrays: Sequence[mx.array], numbers: Numbers) -> StandIn:
        return _TogetherStandIn(self, arrays, numbers)

    def commit(self, written: Sequence[mx.array]) -> None:
        self.ragged.written(tuple(written), self.new)
        self.cache.finalize()


class _BatchStandIn(StandIn):
    _view: View | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        if self.written is not None:
            raise Untraceable("a layer writes to its cache twice")
        self._view = self._append(keys, values)
        return self._view, self._view

    def _append(self, keys: mx.array, values: mx.array) -> View:
        """Set `written`; the view with the new tokens."""
        raise NotImplementedError

    def keys_and_values(self):
        self.shared = True
        return self._view, self._view


class _TogetherStandIn(_BatchStandIn):
    def __init__(self, form: Together, arrays: Sequence[mx.array], numbers: Numbers):
        self._numbers, self._live = numbers, tuple(arrays[:2])
        self._batch, self._division, self._centre = form.batch, form.division, form.ragged.centre
        rest = 4 if form.has_sink else 2
        self._sink = tuple(arrays[2:rest]) or None
        self._pages = form.ragged.room(arrays[rest:])

    @property
    def offset(self) -> mx.array:
        return self._numbers.once("offset", lambda: self._numbers.array[: self._batch])

    def _append(self, keys: mx.array, values: mx.array) -> View:
        pair = left(self._centre, keys), values
        self.written = put(self._live, pair, self._numbers, self._batch, each=True)
        lengths = self._numbers.once(
            "lengths", lambda: Later(self._numbers.array[2 * self._batch :], self._division)
        )
        return View(self.written, self._sink, self._pages, lengths=lengths, seen=_not_by_kernels)


def _not_by_kernels(new: int) -> mx.array:
    raise Untraceable("sequences in shared arrays are read without kernels")


class Rows(Form):
    """Build the form of separate caches, all with sealed pages: the arrays of `Own` for each."""

    own: type[Own] = Own

    def __init__(self, cache: BatchedKVCache, new: int):
        self.cache, self.forms = cache, [self.own(row, new) for row in cache.rows]
        self.emulated = any(form.emulated for form in self.forms)
        self.seals = any(form.seals for form in self.forms)
        self.key = type(self), *(form.key for form in self.forms)
        self.lockstep = type(self), *(form.lockstep for form in self.forms)
        self.state = tuple(form.state for form in self.forms)
        self.arrays = [x for form in self.forms for x in form.arrays]

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(n for form in self.forms for n in form.numbers)

    @property
    def advance(self) -> tuple[int, ...]:
        return tuple(n for form in self.forms for n in form.advance)

    def standing_in(self, arrays: Sequence[mx.array], numbers: Numbers) -> StandIn:
        return RowsStandIn(self.forms, arrays, numbers)

    def commit(self, written: Sequence[mx.array]) -> None:
        each = _parts([form.writes for form in self.forms])
        for form, part in zip(self.forms, each, strict=True):
            form.commit(written[part])
        self.cache.finalize()


class RowsStandIn(_BatchStandIn):
    def __init__(self, forms: Sequence[Own], arrays: Sequence[mx.array], numbers: Numbers):
        def split() -> list[Numbers]:
            each = _parts([len(form.numbers) for form in forms])
            return [Numbers(numbers.array[part]) for part in each]

        self._numbers, each = numbers, _parts([len(form.arrays) for form in forms])
        self._rows = [
            form.standing_in(arrays[part], own)
            for form, part, own in zip(forms, each, numbers.once("rows", split), strict=True)
        ]

    @property
    def offset(self) -> mx.array:
        return self._numbers.once("offset", lambda: mx.stack([row.offset for row in self._rows]))

    def _append(self, keys: mx.array, values: mx.array) -> View:
        views = [view for view, _ in self.each(keys, values)]
        return View(views[0].live, rows=tuple((view, None) for view in views))

    def each(self, keys: mx.array, values: mx.array) -> list[tuple]:
        """Set `written`; what the stand-in of each sequence returns."""
        out = [
            row.update_and_fetch(keys[i : i + 1], values[i : i + 1])
            for i, row in enumerate(self._rows)
        ]
        self.written = [x for row in self._rows for x in row.written]
        return out


def _parts(counts: Sequence[int]) -> list[slice]:
    """Slices of so many, one behind the other."""
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]
