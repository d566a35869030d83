"""Static caches for layers that keep mlx-lm's own caches: sliding windows, states, full precision.

Caches are typed as Any: by mlx-lm's annotations their keys are None, but each holds tokens before a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property, partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, BatchRotatingKVCache

from mlxkv.cache.static import NotYet, StaticCache, StepIndices, Untraceable, put
from mlxkv.cache.view import TracedView
from mlxkv.metal.launch import device_type
from mlxkv.patching.mlx_lm_compat import (
    pads_right,
    ring_index,
    ring_tokens,
    set_ring_index,
    set_ring_tokens,
)


class Buffers(StaticCache):
    """A static cache over buffers of keys and values. first: the position of the write index among the indices.
    is_full: whether all of the buffers is visible, so that no mask is needed."""

    first, is_full = 1, False

    def append(
        self, arrays: Sequence[mx.array], indices: StepIndices, keys: mx.array, values: mx.array
    ) -> tuple[Sequence[mx.array], tuple]:
        pair = put(arrays[:2], (keys, values), indices, self.first)
        if self.is_full:
            return pair, pair
        view = TracedView(pair, seen=partial(self.visible, indices))
        return pair, (view, view)

    def make_mask(self, N: int, return_array: bool, window_size: int | None):
        if window_size is not None and window_size < self.arrays[0].shape[2]:
            raise Untraceable("a window that is shorter than its cache")
        return super().make_mask(N, return_array, None)

    def visible(self, indices: StepIndices, new: int) -> mx.array:
        """Return a mask [L, capacity] of the places visible to each new token."""
        capacity = self.arrays[0].shape[2]
        return indices.once(
            ("seen", capacity, new),
            lambda: mx.arange(capacity)[None] <= indices.array[1] + mx.arange(new)[:, None],
        )


class Ring(Buffers):
    """`RotatingKVCache`: new tokens overwrite the oldest, at a write index. A mask hides unwritten places until the
    ring is full. Indices: offset, place."""

    def __init__(self, cache: Any, new: int):
        if cache.keys.shape[2] > cache.max_size:
            raise NotYet("mlx-lm has yet to cut the window")
        end = cache.offset + new
        if new > 1 and end > cache.max_size:
            raise NotYet("several tokens at once around a ring")
        if cache.offset < cache.max_size and ring_index(cache) != cache.offset:
            raise NotYet("a ring that was taken back")
        if end > cache.keys.shape[2] < cache.max_size:
            grow(cache, min(cache.max_size, whole_steps(end, cache.step)))
        self.cache, self.new = cache, new
        at = ring_index(cache)
        self.at = cache.keep if at == cache.max_size else at
        self.is_full = end >= cache.keys.shape[2]
        self.key = Ring, self.is_full
        self.lockstep = Ring, cache.max_size, cache.keep
        self.arrays = [cache.keys, cache.values]
        self.state = self.indices = cache.offset, self.at
        self.advance = new, new

    def commit(self, arrays: Sequence[mx.array]) -> None:
        cache = self.cache
        cache.keys, cache.values = arrays
        cache.offset += self.new
        set_ring_index(cache, self.at + self.new)


class Plain(Buffers):
    """`KVCache`: a buffer with a mask over unwritten places. Indices: offset, offset.

    Not for CUDA, where MLX's masked attention takes several times as long as unmasked.
    """

    def __init__(self, cache: Any, new: int):
        if device_type() == "cuda":
            raise Untraceable("full precision with a mask is slow on CUDA")
        if cache.offset + new > cache.keys.shape[2]:
            grow(cache, whole_steps(cache.offset + new, cache.step))
        self.cache, self.new = cache, new
        self.key = self.lockstep = Plain
        self.arrays = [cache.keys, cache.values]
        self.state = self.indices = cache.offset, cache.offset
        self.advance = new, new

    def commit(self, arrays: Sequence[mx.array]) -> None:
        self.cache.keys, self.cache.values = arrays
        self.cache.offset += self.new


def whole_steps(tokens: int, step: int) -> int:
    """Round `tokens` up to a multiple of `step`."""
    return -(-tokens // step) * step


def grow(cache, capacity: int) -> None:
    """Grow the buffers of an mlx-lm cache to `capacity` tokens."""
    for name in ("keys", "values"):
        x = getattr(cache, name)
        zeros = mx.zeros((*x.shape[:2], capacity - x.shape[2], x.shape[3]), x.dtype)
        setattr(cache, name, mx.concatenate([x, zeros], axis=2))


class Arrays(StaticCache):
    """`ArraysCache`: states of fixed shapes. No indices."""

    def __init__(self, cache: ArraysCache, new: int):
        self.cache, self.new = cache, new
        self.filled = [i for i, x in enumerate(cache.cache) if x is not None]
        self.extras = [
            n for n in ("left_padding", "lengths") if getattr(cache, n, None) is not None
        ]
        self.key = Arrays, type(cache), len(cache.cache), *self.filled, *self.extras
        self.lockstep = Arrays
        self.arrays = self.of(cache)
        self.state = self.indices = self.advance = ()

    def of(self, cache: ArraysCache) -> list[mx.array]:
        """Return the arrays of `cache`."""
        states: list[Any] = [cache.cache[i] for i in self.filled]  # none is None
        return states + [getattr(cache, name) for name in self.extras]

    def give(self, cache: ArraysCache, arrays: Sequence[mx.array]) -> None:
        """Put `arrays` into `cache`: the inverse of `of`."""
        cache.cache = list(cache.cache)
        for i, x in zip(self.filled, arrays, strict=False):
            cache.cache[i] = x
        for name, x in zip(self.extras, arrays[len(self.filled) :], strict=True):
            setattr(cache, name, x)

    def proxy(self, arrays: Sequence[mx.array], indices: StepIndices) -> ArraysCache:
        """Return mlx-lm's own class over arrays of the trace."""
        kind = type(self.cache)
        out = _stand_in(kind).__new__(_stand_in(kind))
        vars(out).update(vars(self.cache), static=self)
        self.give(out, arrays)
        return out

    def commit(self, arrays: Sequence[mx.array]) -> None:
        self.give(self.cache, arrays)


@cache
def _stand_in(kind: type[ArraysCache]) -> type[ArraysCache]:
    """Return a subclass with `written`."""

    def written(self) -> list[mx.array]:
        if any(x is not None for i, x in enumerate(self.cache) if i not in self.static.filled):
            raise NotYet("a state that was not there before")
        return self.static.of(self)

    return type(kind.__name__, (kind,), {"written": property(written)})


# -- mlx-lm's batched rings, which pad sequences on the left.
#
# The ends of padding are in device arrays. The host reads them once after sequences join or leave, then counts by
# itself: so it knows when a ring is fully visible and needs no mask.

Integers = tuple[int, ...]
# By cache: mlx-lm's position in it, its arrays of offsets and padding, and their values.
_read: WeakKeyDictionary[object, tuple[Integers, mx.array, mx.array, Integers, Integers]] = (
    WeakKeyDictionary()
)


def _stand(cache: BatchRotatingKVCache) -> Integers:
    """Return numbers that change whenever mlx-lm writes or trims tokens: its arrays change in place and stay the same
    objects."""
    return ring_index(cache), ring_tokens(cache)


class PaddedRing(Buffers):
    """`BatchRotatingKVCache`. Indices: place; the offset of each sequence; the padding of each after this
    step."""

    first = 0

    def __init__(self, cache: Any, new: int):
        at, capacity = ring_index(cache), cache.keys.shape[2]
        if new > 1:
            raise NotYet("several tokens at once around a ring")
        if pads_right(cache):
            raise NotYet("prompts of unequal lengths are read")
        if capacity > cache.max_size:
            raise NotYet("mlx-lm has yet to cut the window")
        self.rotated = cache.rotated or at == cache.max_size
        if not self.rotated and at != ring_tokens(cache):
            raise NotYet("a ring that was taken back")
        steps = min(cache.max_size, whole_steps(max(at + 1, capacity), cache.step))
        if steps > capacity and not self.rotated:  # in whole steps, to limit the number of shapes
            grow(cache, steps)
        self.cache, self.place = cache, 0 if at == cache.max_size else at
        self.arrays = [cache.keys, cache.values]
        self.lockstep = PaddedRing, cache.max_size, self.rotated

    @cached_property
    def lengths(self) -> tuple[Integers, Integers]:
        """The offsets and the padding of the sequences. Waits for the device at the first step after
        sequences join or leave, so it is called only once all caches allow the step."""
        cache, record = self.cache, _read.get(self.cache)
        if (
            record is not None
            and record[0] == _stand(cache)
            and record[1] is cache.offset
            and record[2] is cache.left_padding
        ):
            return record[3:]
        offsets, padding = cache.offset.tolist(), cache.left_padding.tolist()
        return tuple(cast(list[int], offsets)), tuple(cast(list[int], padding))

    @property
    def state(self) -> tuple[int, Integers, Integers]:
        return self.place, *self.lengths

    @cached_property
    def indices(self) -> Integers:
        offsets, padding = self.lengths
        return self.place, *offsets, *(n - self.rotated for n in padding)

    @property
    def advance(self) -> Integers:
        batch = len(self.lengths[0])
        return (1,) * (1 + batch) + (-int(self.rotated),) * batch

    @cached_property
    def is_full(self) -> bool:
        """Return whether the new token sees the whole ring."""
        capacity, batch = self.arrays[0].shape[2], len(self.lengths[0])
        return (self.rotated or self.place + 1 == capacity) and max(self.indices[1 + batch :]) <= 0

    @property
    def key(self):
        return PaddedRing, self.rotated, self.is_full

    def offset(self, indices: StepIndices) -> mx.array:
        stop = 1 + len(self.lengths[0])
        return indices.once("offset", lambda: indices.array[1:stop])

    def _padding(self, indices: StepIndices) -> mx.array:
        start = 1 + len(self.lengths[0])
        return indices.once("padding", lambda: indices.array[start:])

    def append(
        self, arrays: Sequence[mx.array], indices: StepIndices, keys: mx.array, values: mx.array
    ) -> tuple[Sequence[mx.array], tuple]:
        pair, views = super().append(arrays, indices, keys, values)
        offset = indices.once("next offset", lambda: self.offset(indices) + 1)
        return (*pair, offset, self._padding(indices)), views

    def visible(self, indices: StepIndices, new: int) -> mx.array:
        capacity = self.arrays[0].shape[2]

        def make() -> mx.array:
            padding, place = self._padding(indices)[:, None, None, None], indices.array[0]
            columns = mx.arange(capacity)
            if not self.rotated:
                return (padding <= columns) & (columns <= place)
            ages = columns - place - 1
            return padding <= mx.where(ages < 0, ages + capacity, ages)  # the place is the newest

        return indices.once(("seen", capacity), make)

    def commit(self, arrays: Sequence[mx.array]) -> None:
        cache, batch = self.cache, len(self.lengths[0])
        # New handles: mlx-lm writes in place, and layers would share the arrays.
        cache.keys, cache.values, cache.offset, cache.left_padding = map(mx.array, arrays)
        cache.rotated = self.rotated
        set_ring_index(cache, self.place + 1)
        set_ring_tokens(cache, ring_tokens(cache) + 1)
        offsets, padding = self.indices[1 : 1 + batch], self.indices[1 + batch :]
        offsets = tuple(n + 1 for n in offsets)
        _read[cache] = _stand(cache), cache.offset, cache.left_padding, offsets, padding
