"""Caches in a step of fixed shapes, which is traced once and replayed: whole buffers, and arrays that say how much of
them is in use. The loop around it is `models.compiled`.

`Form` is what a traced step has to know of one cache, and what it leaves in it.

A step goes through three stages. On the host, `form` looks at a cache: its arrays, its numbers (how much of
the arrays is in use), and what a trace takes for granted. In the trace, `standing_in` is what the model's code sees
in place of the cache. On the host again, `commit` hands the arrays that were written back to the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

import mlx.core as mx

from mlxkv.cache.batch import BatchedKVCache
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.stores import Records
from mlxkv.cache.view import View
from mlxkv.codec.transform import left
from mlxkv.formats.records import TOKENS
from mlxkv.metal.lengths import Division, Later, shared


class Untraceable(Exception):
    """A step cannot be traced, for good: its text says why."""


class NotYet(Exception):
    """This cache takes this step as it is; a later one may be traced."""


class Numbers:
    """The integers of a cache in a step: an array in the trace, shared by caches that go in step.

    array: int32. made: what layers have made of it, for others in the same step.
    """

    def __init__(self, array: mx.array):
        self.array = array
        self.made: dict[Hashable, object] = {}

    def once(self, key: Hashable, make: Callable[[], object]) -> object:
        """Return what `make` returned for this key in this step."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def places(self, first: int, shape: tuple[int, ...], each: bool = False) -> mx.array:
        """Return where new keys, or values, of this shape [B, G, L, D] go: the place that number `first` says, and
        the next ones. each: B numbers from `first` on say it, one for each sequence."""

        def make() -> mx.array:
            at = self.array[first : first + (shape[0] if each else 1)]
            at = at[:, None] + mx.arange(shape[2], dtype=mx.int32)
            return mx.broadcast_to(at[:, None, :, None], shape)

        return self.once(("places", first, shape), make)


class Form:
    """A cache, as the next step of `new` tokens finds it. A subclass sets what follows.

    key: what the trace takes for granted, beside the shapes of arrays. lockstep: caches with equal ones
    have equal numbers, as a rule. state: what the numbers follow from, for equal `lockstep` and shapes.
    arrays: which the step reads, and may write. numbers: integers.
    advance: by how much each of them grows in the step, where nothing is sealed. emulated: whether its kernels
    are such that no trace can hold them. seals: whether the step seals a page.
    """

    emulated = seals = False

    key: Hashable
    lockstep: Hashable
    state: Hashable
    arrays: Sequence[mx.array]
    numbers: tuple[int, ...]
    advance: tuple[int, ...]

    def standing_in(self, arrays: Sequence[mx.array], numbers: Numbers) -> StandIn:
        """Return what the model's code sees in the trace. arrays, numbers: in the trace."""
        raise NotImplementedError

    def commit(self, written: Sequence[mx.array]) -> None:
        """Take over what the trace wrote (`StandIn.written`)."""
        raise NotImplementedError


class Unused(Form):
    """A cache that holds nothing when others do: the model's code never asks for it."""

    def __init__(self):
        self.key = self.lockstep = Unused
        self.arrays, self.state, self.numbers, self.advance = [], (), (), ()

    def standing_in(self, arrays: Sequence[mx.array], numbers: Numbers) -> StandIn:
        return _UnusedStandIn()

    def commit(self, written: Sequence[mx.array]) -> None:
        pass


def put(
    pair: tuple, new: tuple, numbers: Numbers, first: int, each: bool = False
) -> tuple[mx.array, mx.array]:
    """The buffers [B, G, room, D] with new keys and values; first, each: as in `Numbers.places`.

    By a scatter: a slice at a dynamic place takes MLX twice as many kernels. Raises Untraceable for
    another batch or other heads, which a scatter would broadcast.
    """
    pairs = list(zip(pair, new, strict=True))
    if any(x.shape[:2] + x.shape[3:] != old.shape[:2] + old.shape[3:] for old, x in pairs):
        raise Untraceable("keys of another batch, or of other heads, than the cache holds")
    return tuple(
        mx.put_along_axis(old, numbers.places(first, x.shape, each), x.astype(old.dtype), axis=2)
        for old, x in pairs
    )


class StandIn:
    """A cache in a trace. Any use that a replay could not repeat raises Untraceable.

    written: the form's arrays after the step. shared: whether other layers read it, too.
    """

    shared = False
    written: Sequence[mx.array] | None = None
    _numbers: Numbers
    _live: tuple[mx.array, mx.array]  # buffers of keys and values

    @property
    def offset(self) -> mx.array:
        """The position of the first new token, int32: a scalar, number 0 unless overridden; or [B]."""
        return self._numbers.once("offset", lambda: self._numbers.array[0])

    def _write(self, keys: mx.array, values: mx.array, first: int) -> None:
        """Set `written` to the buffers with new keys and values; first: as in `Numbers.places`. Raises
        Untraceable for a second time."""
        if self.written is not None:
            raise Untraceable("a layer writes to its cache twice")
        self.written = put(self._live, (keys, values), self._numbers, first)

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        raise NotImplementedError

    def keys_and_values(self):
        """Return what `update_and_fetch` returned, for layers that share a cache (mlx-lm 0.32)."""
        raise NotImplementedError

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        if return_array or window_size is not None:
            raise Untraceable("the model's code asks compressed layers for a mask as an array")
        return None if N == 1 else "causal"

    def __getattr__(self, name: str):
        if (
            name.startswith("__") or name == "bits"
        ):  # "bits": mlx-lm looks for its own quantized caches
            raise AttributeError(name)
        raise Untraceable(f"the model's code uses .{name} of its cache")


class _UnusedStandIn(StandIn):
    written = ()

    @property
    def offset(self) -> mx.array:
        raise NotYet("nothing is read yet")

    def _asked(self, *args, **kwargs):
        raise NotYet("nothing is read yet")

    update_and_fetch = keys_and_values = make_mask = _asked


# -- The form of `CompressedKVCache`: its pages as they are, its live window in buffers of fixed room.


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
        windows = 4 if form.n_sink else 2
        self._sink = tuple(arrays[2:windows]) or None
        self._pages = form.store.room(arrays[windows:])
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
        windows = 4 if form.has_sink else 2
        self._sink = tuple(arrays[2:windows]) or None
        self._pages = form.ragged.room(arrays[windows:])

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
        parts = _parts([form.writes for form in self.forms])
        for form, part in zip(self.forms, parts, strict=True):
            form.commit(written[part])
        self.cache.finalize()


class RowsStandIn(_BatchStandIn):
    def __init__(self, forms: Sequence[Own], arrays: Sequence[mx.array], numbers: Numbers):
        def split() -> list[Numbers]:
            parts = _parts([len(form.numbers) for form in forms])
            return [Numbers(numbers.array[part]) for part in parts]

        self._numbers, parts = numbers, _parts([len(form.arrays) for form in forms])
        self._rows = [
            form.standing_in(arrays[part], group)
            for form, part, group in zip(forms, parts, numbers.once("rows", split), strict=True)
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
