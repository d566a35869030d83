"""The forms of mlx-lm's batched caches of attention, which pad sequences on the left.

Where padding ends is in arrays there. The host reads it once whenever sequences have come or gone, then counts
on: so it knows when all that a ring holds is seen, and no mask is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache

from mlxkv.cache.fixed.form import Form, NotYet, Numbers, StandIn, Untraceable
from mlxkv.metal.launch import backend
from mlxkv.models.compiled.plain import Window, grow, whole_steps

Integers = tuple[int, ...]
# Of a cache: where mlx-lm stands in it, its arrays of offsets and of padding, and what is in them.
_read: WeakKeyDictionary[object, tuple[Integers, mx.array, mx.array, Integers, Integers]] = (
    WeakKeyDictionary()
)


def _stand(cache) -> Integers:
    """Return what changes with every token that mlx-lm writes or takes back; its arrays, changed in place, stay the
    same objects."""
    return cache._idx, getattr(cache, "_offset", 0)


class _Padded(Form):
    """Numbers: place; of each sequence its offset; of each its padding, as it is after this step."""

    is_full = False

    def __init__(self, cache, new: int, place: int):
        self.cache, self.new, self.place = cache, new, place
        self.arrays = [cache.keys, cache.values]

    @cached_property
    def held(self) -> tuple[Integers, Integers]:
        """The offsets and the padding of the sequences. Waits for the device, at the first step after
        sequences have come or gone; so it is asked for only when all caches take the step."""
        cache, found = self.cache, _read.get(self.cache)
        same = found is not None and found[0] == _stand(cache)
        if same and found[1] is cache.offset and found[2] is cache.left_padding:
            return found[3:]
        return tuple(cache.offset.tolist()), tuple(cache.left_padding.tolist())

    @property
    def state(self) -> tuple[int, Integers, Integers]:
        return self.place, *self.held

    @cached_property
    def numbers(self) -> Integers:
        offsets, padding = self.held
        return self.place, *offsets, *(n - self.taken for n in padding)

    @property
    def taken(self) -> int:
        """Places of padding that this step overwrites."""
        return 0

    @property
    def advance(self) -> Integers:
        batch = len(self.held[0])
        return (self.new,) * (1 + batch) + (-self.taken,) * batch

    def standing_in(self, arrays: Sequence[mx.array], numbers: Numbers) -> StandIn:
        return _PaddedWindow(self, arrays, numbers)

    def commit(self, written: Sequence[mx.array]) -> None:
        cache, batch = self.cache, len(self.held[0])
        # New handles: mlx-lm writes in place into what layers would share.
        cache.keys, cache.values, cache.offset, cache.left_padding = map(mx.array, written)
        cache._idx = self.place + self.new
        self.stand()
        offsets, padding = self.numbers[1 : 1 + batch], self.numbers[1 + batch :]
        offsets = tuple(n + self.new for n in offsets)
        _read[cache] = _stand(cache), cache.offset, cache.left_padding, offsets, padding

    def stand(self) -> None:
        """Note in the cache that it has the new tokens, besides its arrays and `_idx`."""


class PaddedRing(_Padded):
    """`BatchRotatingKVCache`."""

    def __init__(self, cache: BatchRotatingKVCache, new: int):
        room, at = cache.keys.shape[2], cache._idx
        if new > 1:
            raise NotYet("several tokens at once around a ring")
        if cache._lengths is not None:
            raise NotYet("prompts of unequal lengths are read")
        if room > cache.max_size:
            raise NotYet("mlx-lm has yet to cut the window")
        self.rotated = cache.rotated or at == cache.max_size
        if not self.rotated and at != cache._offset:
            raise NotYet("a ring that was taken back")
        if not self.rotated:
            _make_room(cache, at + 1, cache.max_size)
        super().__init__(cache, new, 0 if at == cache.max_size else at)
        self.lockstep = PaddedRing, cache.max_size, self.rotated

    @property
    def taken(self) -> int:
        return int(self.rotated)

    @cached_property
    def is_full(self) -> bool:
        """Return whether the new token sees all that the ring holds."""
        room, batch = self.arrays[0].shape[2], len(self.held[0])
        return (self.rotated or self.place + 1 == room) and max(self.numbers[1 + batch :]) <= 0

    @cached_property
    def key(self):
        return PaddedRing, self.rotated, self.is_full

    def seen(self, room: int, new: int, place: mx.array, padding: mx.array) -> mx.array:
        columns = mx.arange(room)
        if not self.rotated:
            return (padding <= columns) & (columns <= place)
        ages = columns - place - 1
        return padding <= mx.where(ages < 0, ages + room, ages)  # the place is the newest

    def stand(self) -> None:
        self.cache._offset += self.new
        self.cache.rotated = self.rotated


class PaddedPlain(_Padded):
    """`BatchKVCache`. Not for CUDA, as `Plain`."""

    key = "PaddedPlain"

    def __init__(self, cache: BatchKVCache, new: int):
        if backend() == "cuda":
            raise Untraceable("full precision with a mask is slow on CUDA")
        if cache._right_padding is not None:
            raise NotYet("prompts of unequal lengths are read")
        _make_room(cache, cache._idx + new)
        super().__init__(cache, new, cache._idx)
        self.lockstep = PaddedPlain

    def seen(self, room: int, new: int, place: mx.array, padding: mx.array) -> mx.array:
        columns = mx.arange(room)
        return (padding <= columns) & (columns <= place + mx.arange(new)[:, None])


def _make_room(cache, tokens: int, most: int | None = None) -> None:
    """Have room for so many tokens, in whole steps as far as there are `most`, so that shapes are few."""
    room = whole_steps(max(tokens, cache.keys.shape[2]), cache.step)
    room = room if most is None else min(room, most)
    if room > cache.keys.shape[2]:
        grow(cache, room)


class _PaddedWindow(Window):
    place = 0

    def __init__(self, form: _Padded, arrays: Sequence[mx.array], numbers: Numbers):
        super().__init__(arrays, numbers, form.is_full)
        self._form, self._batch = form, arrays[0].shape[0]

    @property
    def offset(self) -> mx.array:
        stop = 1 + self._batch
        return self._numbers.once("offset", lambda: self._numbers.array[1:stop])

    @property
    def _padding(self) -> mx.array:
        start = 1 + self._batch
        return self._numbers.once("padding", lambda: self._numbers.array[start:])

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        pair, new = super().update_and_fetch(keys, values), keys.shape[2]
        offset = self._numbers.once(("offset", new), lambda: self.offset + new)
        self.written = *self.written, offset, self._padding
        return pair

    def _seen(self, new: int) -> mx.array:
        room, padding = self._live[0].shape[2], self._padding[:, None, None, None]
        return self._numbers.once(
            ("seen", room, new),
            lambda: self._form.seen(room, new, self._numbers.array[0], padding),
        )
