"""`Form`: what a traced step has to know of one cache, and what it leaves in it.

A step goes through three stages. On the host, `form` looks at a cache: its arrays, its numbers (how much of
the arrays is in use), and what a trace takes for granted. In the trace, `standing_in` is what the model's code sees
in place of the cache. On the host again, `commit` hands the arrays that were written back to the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import mlx.core as mx


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
    both = list(zip(pair, new, strict=True))
    if any(x.shape[:2] + x.shape[3:] != old.shape[:2] + old.shape[3:] for old, x in both):
        raise Untraceable("keys of another batch, or of other heads, than the cache holds")
    return tuple(
        mx.put_along_axis(old, numbers.places(first, x.shape, each), x.astype(old.dtype), axis=2)
        for old, x in both
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
