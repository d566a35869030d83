"""Caches in a step of fixed shapes, which is traced once and replayed: whole buffers, and arrays that say how much of
them is in use. The loop around it is `models.compiled`.

A `Form` is a cache as the next step finds it. On the host it has arrays, numbers (how much of the arrays is in use),
and what a trace takes for granted. In the trace, `StandIn` is what the model's code sees in place of the cache, and
`Form.append` computes what it writes and reads. On the host again, `Form.commit` hands the arrays that were written
back to the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import mlx.core as mx

from mlxkv.cache.batch import BatchedKVCache
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.stores import Records
from mlxkv.cache.view import View
from mlxkv.codec.transform import left
from mlxkv.formats.records import TOKENS
from mlxkv.metal.lengths import Division, Lengths, shared

Arrays = Sequence[mx.array]


class Untraceable(Exception):
    """A step cannot be traced, for good: its text says why."""


class NotYet(Exception):
    """This step cannot be traced; a later one may be."""


class Numbers:
    """The integers of a cache in a step: an array in the trace, shared by caches that go in step.

    array: int32. results: what layers have made of it, for others in the same step.
    """

    def __init__(self, array: mx.array):
        self.array = array
        self.results: dict[Hashable, object] = {}

    def once(self, key: Hashable, make: Callable[[], object]) -> object:
        """Return what `make` returned for this key in this step."""
        if key not in self.results:
            self.results[key] = make()
        return self.results[key]

    def places(self, first: int, shape: tuple[int, ...], by_row: bool = False) -> mx.array:
        """Return where new keys, or values, of this shape [B, G, L, D] go: the place that number `first` says, and
        the next ones. by_row: B numbers from `first` on say it, one for each sequence."""

        def make() -> mx.array:
            at = self.array[first : first + (shape[0] if by_row else 1)]
            at = at[:, None] + mx.arange(shape[2], dtype=mx.int32)
            return mx.broadcast_to(at[:, None, :, None], shape)

        return self.once(("places", first, shape), make)


class Form:
    """A cache, as the next step of `new` tokens finds it. A subclass sets what follows.

    key: what the trace takes for granted, beside the shapes of arrays. lockstep: caches with equal ones
    have equal numbers, as a rule. state: what the numbers follow from, for equal `lockstep` and shapes.
    arrays: which the step reads, and may write. numbers: integers.
    advance: by how much each of them grows in the step, where nothing is quantized. emulated: whether its kernels
    are such that no trace can hold them. quantizes: whether the step quantizes a page.
    """

    emulated = quantizes = False

    key: Hashable
    lockstep: Hashable
    state: Hashable
    arrays: Arrays
    numbers: tuple[int, ...]
    advance: tuple[int, ...]

    def standing_in(self, arrays: Arrays, numbers: Numbers) -> StandIn:
        """Return what the model's code sees in the trace. arrays, numbers: in the trace."""
        return StandIn(self, arrays, numbers)

    def offset(self, numbers: Numbers) -> mx.array:
        """The position of the first new token, int32: a scalar, number 0 unless overridden; or [B]."""
        return numbers.once("offset", lambda: numbers.array[0])

    def append(
        self, arrays: Arrays, numbers: Numbers, keys: mx.array, values: mx.array
    ) -> tuple[Arrays, tuple]:
        """Return, in the trace, the arrays that the step writes and what `update_and_fetch` returns."""
        raise NotImplementedError

    def make_mask(self, N: int, return_array: bool, window_size: int | None):
        if return_array or window_size is not None:
            raise Untraceable("the model's code asks compressed layers for a mask as an array")
        return None if N == 1 else "causal"

    def commit(self, arrays: Arrays) -> None:
        """Take over what the trace wrote."""
        raise NotImplementedError


class StandIn:
    """A cache in a trace. Any use that a replay could not repeat raises Untraceable.

    written: the form's arrays after the step. shared: whether other layers read it, too.
    """

    shared = False
    written: Arrays | None = None

    def __init__(self, form: Form, arrays: Arrays, numbers: Numbers):
        self._form, self._arrays, self._numbers, self._views = form, arrays, numbers, None

    @property
    def offset(self) -> mx.array:
        return self._form.offset(self._numbers)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple:
        if self.written is not None:
            raise Untraceable("a layer writes to its cache twice")
        self.written, self._views = self._form.append(self._arrays, self._numbers, keys, values)
        return self._views

    def keys_and_values(self) -> tuple:
        """Return what `update_and_fetch` returned, for layers that share a cache (mlx-lm 0.32)."""
        self.shared = True
        return self._views

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        return self._form.make_mask(N, return_array, window_size)

    def __getattr__(self, name: str):
        if name.startswith("__") or name == "bits":  # mlx-lm looks for its own quantized caches
            raise AttributeError(name)
        raise Untraceable(f"the model's code uses .{name} of its cache")


class Unused(Form):
    """A cache that holds nothing when others do: the model's code never asks for it."""

    def __init__(self):
        self.key = self.lockstep = Unused
        self.arrays, self.state, self.numbers, self.advance = [], (), (), ()

    def standing_in(self, arrays: Arrays, numbers: Numbers) -> StandIn:
        return _UnusedStandIn()

    def commit(self, arrays: Arrays) -> None:
        pass


class _UnusedStandIn(StandIn):
    written = ()

    def __init__(self):
        pass

    @property
    def offset(self) -> mx.array:
        raise NotYet("nothing is read yet")

    def _wait(self, *args, **kwargs):
        raise NotYet("nothing is read yet")

    update_and_fetch = keys_and_values = make_mask = _wait


def put(
    pair: Arrays, new: tuple, numbers: Numbers, first: int, by_row: bool = False
) -> tuple[mx.array, mx.array]:
    """The buffers [B, G, room, D] with new keys and values; first, by_row: as in `Numbers.places`.

    By a scatter: a slice at a dynamic place takes MLX twice as many kernels. Raises Untraceable for
    another batch or other heads, which a scatter would broadcast.
    """
    pairs = list(zip(pair, new, strict=True))
    if any(x.shape[:2] + x.shape[3:] != old.shape[:2] + old.shape[3:] for old, x in pairs):
        raise Untraceable("keys of another batch, or of other heads, than the cache holds")
    return tuple(
        mx.put_along_axis(old, numbers.places(first, x.shape, by_row), x.astype(old.dtype), axis=2)
        for old, x in pairs
    )


class Own(Form):
    """A `CompressedKVCache`: its pages as they are, its recent window in buffers of fixed room.

    Numbers: offset, recent tokens before, then, of each sequence, records, sink tokens, recent tokens
    after, first record; in place of the records of plain ops, their tokens.

    writes: how many of its arrays, from the first on, a step writes.
    """

    writes = 2

    def __init__(self, cache: CompressedKVCache, new: int):
        if (recent := cache.recent_buffers) is None:
            raise NotYet("nothing is quantized yet")
        self.cache, self.new, self.store = cache, new, cache.store
        sink, config, pages = cache.sink, cache.config, self.store.pages
        self.n_sink = config.sink if sink else 0
        self.quantizes = cache.count + new > config.room(sink is not None)
        self.centre = cache.centre
        self.key = self.store.form, self.n_sink, self.centre
        shape = recent[0].shape[:2]
        self.lockstep = type(self.store), shape, config.page, config.recent, self.n_sink
        self.state = cache.offset, cache.count, pages.counts[0]
        self.arrays = [*recent, *(sink or ()), *pages.arrays.values()]
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
        new, batch = self.new, self.cache.recent_buffers[0].shape[0]
        rows = batch if isinstance(self.store, Records) else 1
        return new, new, *(0, 0, new, 0) * rows

    def append(
        self, arrays: Arrays, numbers: Numbers, keys: mx.array, values: mx.array
    ) -> tuple[Arrays, tuple]:
        recent = put(arrays[:2], (left(self.centre, keys), values), numbers, 1)
        sink, pages = _parted(arrays, bool(self.n_sink), self.store.room)
        division = Division(pages.tokens // TOKENS)
        lengths = numbers.once(("lengths", division), lambda: Lengths(numbers.array[2:], division))
        columns = partial(_columns, numbers, self.n_sink, pages.tokens, recent[0].shape[2])
        view = View(recent, sink, pages, lengths=lengths, seen=columns)
        return recent, (view, view)

    def commit(self, arrays: Arrays) -> None:
        self.cache.written(tuple(arrays), self.new)


def _parted(arrays: Arrays, has_sink: bool, pages: Callable[[Arrays], object]) -> tuple:
    """The sink and the snapshot of the pages of arrays that begin with the recent window."""
    stop = 4 if has_sink else 2
    return tuple(arrays[2:stop]) or None, pages(arrays[stop:])


def _columns(numbers: Numbers, sink: int, pages: int, recent: int, new: int) -> mx.array:
    """[1, 1, L, sink + pages + recent] bool: what each new token sees, with rooms of so many tokens."""

    def make() -> mx.array:
        in_pages = mx.arange(pages) < numbers.array[2]
        in_recent = mx.arange(recent)[None] <= numbers.array[1] + mx.arange(new)[:, None]
        earlier = mx.concatenate([mx.ones((sink,), mx.bool_), in_pages])
        earlier = mx.broadcast_to(earlier[None], (new, sink + pages))
        return mx.concatenate([earlier, in_recent], axis=1)[None, None]

    return numbers.once(("seen", sink, pages, recent, new), make)


# -- The forms of `BatchedKVCache`: sequences in shared arrays, for kernels, or one after the other.


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
        raise NotYet("nothing is quantized yet")


class Together(Form):
    """Sequences in shared arrays. Numbers, with one of each for every sequence: offsets, recent tokens
    before, then records, sink tokens, recent tokens after, and first record of one sequence after the other."""

    def __init__(self, cache: BatchedKVCache, new: int):
        self.cache, self.new, self.ragged = cache, new, cache.ragged
        ragged = self.ragged
        ragged.settle()
        store, config = ragged.store, ragged.config
        self.batch, pages = len(ragged.counts), ragged.pages
        self.division = shared(tuple(n * ragged.page_records for n in pages.counts))
        self.has_sink = ragged.sink is not None
        self.quantizes = ragged.quantizes_after(new)
        self.emulated = store.emulated
        self.key = Together, store.form, self.division, self.has_sink, ragged.centre
        self.lockstep = Together, config.page, config.recent, config.sink
        state = ragged.offsets, ragged.counts, ragged.parted, pages.counts, pages.starts
        self.state = tuple(map(tuple, state))
        self.arrays = [*ragged.recent, *(ragged.sink or ()), *pages.arrays.values()]
        self.advance = (new,) * (2 * self.batch) + (0, 0, new, 0) * self.batch

    @property
    def numbers(self) -> tuple[int, ...]:
        rows = [*self.ragged.offsets, *self.ragged.counts]
        for at, (records, sink, recent) in zip(*self.ragged.lengths, strict=True):
            rows += records, sink, recent + self.new, at
        return tuple(rows)

    def offset(self, numbers: Numbers) -> mx.array:
        return numbers.once("offset", lambda: numbers.array[: self.batch])

    def append(
        self, arrays: Arrays, numbers: Numbers, keys: mx.array, values: mx.array
    ) -> tuple[Arrays, tuple]:
        pair = left(self.ragged.centre, keys), values
        recent = put(arrays[:2], pair, numbers, self.batch, by_row=True)
        sink, pages = _parted(arrays, self.has_sink, self.ragged.room)
        lengths = numbers.once(
            "lengths", lambda: Lengths(numbers.array[2 * self.batch :], self.division)
        )
        view = View(recent, sink, pages, lengths=lengths, seen=_not_by_kernels)
        return recent, (view, view)

    def commit(self, arrays: Arrays) -> None:
        self.ragged.written(tuple(arrays), self.new)
        self.cache.finalize()


def _not_by_kernels(new: int) -> mx.array:
    raise Untraceable("sequences in shared arrays are read without kernels")


class Rows(Form):
    """Separate caches, all with quantized pages: the arrays of `row_form` for each."""

    row_form: type[Own] = Own

    def __init__(self, cache: BatchedKVCache, new: int):
        self.cache, self.forms = cache, [self.row_form(row, new) for row in cache.rows]
        self.emulated = any(form.emulated for form in self.forms)
        self.quantizes = any(form.quantizes for form in self.forms)
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

    def _by_row(self, numbers: Numbers) -> list[Numbers]:
        counts = [len(form.numbers) for form in self.forms]
        return numbers.once("rows", lambda: list(map(Numbers, _cut(numbers.array, counts))))

    def offset(self, numbers: Numbers) -> mx.array:
        def make() -> mx.array:
            rows = zip(self.forms, self._by_row(numbers), strict=True)
            return mx.stack([form.offset(group) for form, group in rows])

        return numbers.once("offset", make)

    def append(
        self, arrays: Arrays, numbers: Numbers, keys: mx.array, values: mx.array
    ) -> tuple[Arrays, tuple]:
        buffers, views = [], []
        parts = _cut(arrays, [len(form.arrays) for form in self.forms])
        rows = zip(self.forms, parts, self._by_row(numbers), strict=True)
        for i, (form, part, group) in enumerate(rows):
            new, view = form.append(part, group, keys[i : i + 1], values[i : i + 1])
            buffers += new
            views.append(view)
        return buffers, self.joined(views)

    def joined(self, views: Sequence[tuple]) -> tuple:
        """Join what `update_and_fetch` returns for each sequence into what it returns for all."""
        view = View(views[0][0].recent, rows=tuple((row, None) for row, _ in views))
        return view, view

    def commit(self, arrays: Arrays) -> None:
        parts = _cut(arrays, [form.writes for form in self.forms])
        for form, part in zip(self.forms, parts, strict=True):
            form.commit(part)
        self.cache.finalize()


def _cut(items, counts: Sequence[int]) -> list:
    """Slices of so many items, one behind the other."""
    return [items[start:stop] for start, stop in pairwise(accumulate(counts, initial=0))]
