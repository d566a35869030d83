"""The forms of mlx-lm's own caches, where layers keep them: sliding windows, states, full precision."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from mlxkv.cache.fixed.form import Form, NotYet, Numbers, StandIn, Untraceable
from mlxkv.cache.view import FixedView
from mlxkv.metal.launch import backend


class Ring(Form):
    """`RotatingKVCache`: new tokens overwrite the oldest, at a place that is a number. Before the ring is
    full, a mask hides what is not written yet. Numbers: offset, place."""

    def __init__(self, cache: RotatingKVCache, new: int):
        if cache.keys.shape[2] > cache.max_size:
            raise NotYet("mlx-lm has yet to cut the window")
        end = cache.offset + new
        if new > 1 and end > cache.max_size:
            raise NotYet("several tokens at once around a ring")
        if cache.offset < cache.max_size and cache._idx != cache.offset:
            raise NotYet("a ring that was taken back")
        if end > cache.keys.shape[2] < cache.max_size:
            grow(cache, min(cache.max_size, whole_steps(end, cache.step)))
        self.cache, self.new = cache, new
        self.at = cache.keep if cache._idx == cache.max_size else cache._idx
        self.is_full = end >= cache.keys.shape[2]
        self.key = Ring, self.is_full
        self.lockstep = Ring, cache.max_size, cache.keep
        self.arrays = [cache.keys, cache.values]
        self.state = self.numbers = cache.offset, self.at
        self.advance = new, new

    def standing_in(self, arrays: Sequence[mx.array], numbers: Numbers) -> StandIn:
        return Window(arrays, numbers, self.is_full)

    def commit(self, written: Sequence[mx.array]) -> None:
        cache = self.cache
        cache.keys, cache.values = written
        cache.offset += self.new
        cache._idx = self.at + self.new


class Plain(Form):
    """`KVCache`: a buffer with a mask over what is not written yet. Numbers: offset, offset.

    Not for CUDA, where MLX's attention with a mask takes several times as long as without.
    """

    def __init__(self, cache: KVCache, new: int):
        if backend() == "cuda":
            raise Untraceable("full precision with a mask is slow on CUDA")
        if cache.offset + new > cache.keys.shape[2]:
            grow(cache, whole_steps(cache.offset + new, cache.step))
        self.cache, self.new = cache, new
        self.key = self.lockstep = Plain
        self.arrays = [cache.keys, cache.values]
        self.state = self.numbers = cache.offset, cache.offset
        self.advance = new, new

    def standing_in(self, arrays: Sequence[mx.array], numbers: Numbers) -> StandIn:
        return Window(arrays, numbers, False)

    def commit(self, written: Sequence[mx.array]) -> None:
        self.cache.keys, self.cache.values = written
        self.cache.offset += self.new


def whole_steps(tokens: int, step: int) -> int:
    """So many tokens, rounded up."""
    return -(-tokens // step) * step


def grow(cache, room: int) -> None:
    """Make room for so many tokens in the buffers of a cache of mlx-lm."""
    for name in ("keys", "values"):
        x = getattr(cache, name)
        more = mx.zeros((*x.shape[:2], room - x.shape[2], x.shape[3]), x.dtype)
        setattr(cache, name, mx.concatenate([x, more], axis=2))


class Window(StandIn):
    """Numbers: offset, place. place: which number is the place."""

    place = 1

    def __init__(self, arrays: Sequence[mx.array], numbers: Numbers, is_full: bool):
        self._numbers, self._live, self._is_full = numbers, tuple(arrays), is_full
        self._pair = None

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        self._write(keys, values, self.place)
        view = FixedView(self.written, None, None, None, self._seen)
        self._pair = self.written if self._is_full else (view, view)
        return self._pair

    def keys_and_values(self):
        return self._pair

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        if window_size is not None and window_size < self._live[0].shape[2]:
            raise Untraceable("a window that is shorter than its cache")
        return super().make_mask(N, return_array)

    def _seen(self, new: int) -> mx.array:
        room = self._live[0].shape[2]
        return self._numbers.once(
            ("seen", room, new),
            lambda: mx.arange(room)[None] <= self._numbers.array[1] + mx.arange(new)[:, None],
        )


class Arrays(Form):
    """`ArraysCache`: states of fixed shapes. No numbers."""

    def __init__(self, cache: ArraysCache, new: int):
        self.cache, self.new = cache, new
        self.held = [i for i, x in enumerate(cache.cache) if x is not None]
        self.others = [
            n for n in ("left_padding", "lengths") if getattr(cache, n, None) is not None
        ]
        self.key = Arrays, type(cache), len(cache.cache), *self.held, *self.others
        self.lockstep = Arrays
        self.arrays = self.of(cache)
        self.state = self.numbers = self.advance = ()

    def of(self, cache: ArraysCache) -> list[mx.array]:
        """The arrays that `cache` holds."""
        own = [cache.cache[i] for i in self.held]
        return own + [getattr(cache, name) for name in self.others]

    def give(self, cache: ArraysCache, arrays: Sequence[mx.array]) -> None:
        """The inverse of `of`."""
        cache.cache = list(cache.cache)
        for i, x in zip(self.held, arrays, strict=False):
            cache.cache[i] = x
        for name, x in zip(self.others, arrays[len(self.held) :], strict=True):
            setattr(cache, name, x)

    def standing_in(self, arrays: Sequence[mx.array], numbers: Numbers) -> ArraysCache:
        """mlx-lm's own class, with arrays of the trace."""
        kind = type(self.cache)
        out = _stand_in(kind).__new__(_stand_in(kind))
        vars(out).update(vars(self.cache))
        out.form = self
        self.give(out, arrays)
        return out

    def commit(self, written: Sequence[mx.array]) -> None:
        self.give(self.cache, written)


@cache
def _stand_in(kind: type[ArraysCache]) -> type[ArraysCache]:
    """The class, with `written`."""

    def written(self) -> list[mx.array]:
        if any(x is not None for i, x in enumerate(self.cache) if i not in self.form.held):
            raise NotYet("a state that was not there before")
        return self.form.of(self)

    return type(kind.__name__, (kind,), {"written": property(written)})
