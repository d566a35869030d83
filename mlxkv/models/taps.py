"""Taps: what a model's layers compute, and what each of their compressed caches was handed.

`tap` replaces the compressed caches of a fresh list by caches that also keep all keys and values
exactly. `watch` shows every pass through a layer: its attention, its output. The model computes
what it would compute without them, and is what it was before once `watch` is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from mlxkv.adaptive import AdaptiveKVCache
from mlxkv.attention import attend
from mlxkv.cache import CompressedKVCache, Pair, View
from mlxkv.calibrated import Rotations
from mlxkv.config import CacheConfig
from mlxkv.models.probe import leaves, put


class Tap(AdaptiveKVCache):
    """A compressed cache beside an exact one. cache: its position in the model's list of caches.

    exact: keys and values as they were handed over, [B, G, T, D] in the model's dtype.
    """

    def __init__(self, config: CacheConfig, cache: int, rotations: Rotations | None = None):
        super().__init__(config, rotations)
        self.cache = cache
        self.exact: Pair | None = None
        self.seen: Callable[[Call], None] | None = None  # set by `watch`
        self._plain = KVCache()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[View, View]:
        self.exact = None  # a hold on it would have the update copy all of it
        self.exact = self._plain.update_and_fetch(keys, values)
        view, _ = super().update_and_fetch(keys, values)
        return self._watched(view)

    def keys_and_values(self) -> tuple[View, View]:
        return self._watched(super().keys_and_values()[0])

    def trim(self, n: int) -> int:
        n = super().trim(n)
        self._plain.trim(n)
        if self.exact is not None:
            self.exact = tuple(x[:, :, : self.offset] for x in self.exact)
        return n

    def _watched(self, view: View) -> tuple[View, View]:
        view = Watched(**vars(view), tap=self)
        return view, view


class Ear(KVCache):
    """A plain cache that says what it was handed, and what attention over it was.

    seen: called with each Call; `watch` sets it. handed: with the new keys and values [B, G, L, D]
    of each update.
    """

    def __init__(
        self,
        seen: Callable[[Call], None] | None = None,
        handed: Callable[[mx.array, mx.array], None] | None = None,
    ):
        super().__init__()
        self.seen, self.handed = seen, handed

    @property
    def exact(self) -> Pair:
        """All keys and values so far, [B, G, T, D]."""
        return self.keys[..., : self.offset, :], self.values[..., : self.offset, :]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[View, View]:
        super().update_and_fetch(keys, values)
        if self.handed is not None:
            self.handed(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[View, View]:
        view = Watched(self.exact, tap=self)
        return view, view


@dataclass(frozen=True)
class Watched(View):
    """The view of a Tap or an Ear, which hears of attention over it."""

    tap: Tap | Ear = field(kw_only=True, repr=False)

    def attended(
        self, queries, values, cache=None, scale: float = 1.0, mask=None, sinks=None
    ) -> mx.array:
        """mlx-lm's signature; attention is the product's own."""
        out = attend(queries, self, scale, mask=mask, sinks=sinks)
        if self.tap.seen is not None:
            self.tap.seen(Call(self, self.tap.exact, queries, scale, mask, sinks, out))
        return out


@dataclass(frozen=True)
class Call:
    """One call of attention over a Tap or an Ear.

    view: what was read. exact: keys and values [B, G, T, D] that it stands for. queries:
    [B, H, L, D]. scale, mask, sinks: as in `attend`. out: [B, H, L, Dv].
    """

    view: Watched
    exact: Pair
    queries: mx.array
    scale: float
    mask: mx.array | str | None
    sinks: mx.array | None
    out: mx.array


@dataclass
class Visit:
    """One pass through a layer.

    index: of the layer in `model.layers`; of the cache where the model does not call its layers as
    a whole. cache: position in the list of caches of the one that it was given, or None. calls: of
    attention over Taps and Ears. hidden: what the layer returned, or None as above.
    """

    index: int
    cache: int | None = None
    calls: list[Call] = field(default_factory=list)
    hidden: mx.array | None = None
    inputs: list[tuple[Callable, mx.array]] = field(default_factory=list)

    def projection(self, call: Call) -> Callable[[mx.array], mx.array] | None:
        """The output projection of `call` as a linear map, [B, H, L, Dv] -> [B, L, hidden size]: the
        first linear layer that received exactly the output of attention, whatever its name. None
        where there is none, because a gate or a norm comes between."""
        flat = joined(call.out)
        for linear, x in self.inputs:
            if x.shape == flat.shape and mx.array_equal(x, flat).item():
                return lambda heads, f=linear: f(joined(heads)) - f(mx.zeros_like(joined(heads)))
        return None


def joined(heads: mx.array) -> mx.array:
    """[B, H, L, Dv] -> [B, L, H * Dv]"""
    batch, _, new, _ = heads.shape
    return heads.swapaxes(1, 2).reshape(batch, new, -1)


def tap(caches: list) -> list[Tap]:
    """Put a Tap in place of every compressed cache in `caches`, which must be empty. Returns them."""
    taps = []
    for place, cache in leaves(caches):
        if type(cache) in (CompressedKVCache, AdaptiveKVCache):
            taps.append(Tap(cache.config, place[0], cache.rotations))
            put(caches, place, taps[-1])
    return taps


@contextmanager
def watch(model: nn.Module, caches: list, see: Callable[[Visit], None]) -> Iterator[None]:
    """Inside, `see` is called after each pass through a layer of `model` that runs on `caches`.

    Layers and their linear maps belong to subclasses of their classes for that time.
    """
    watcher = _Watcher(caches, see)
    taps = [cache for _, cache in leaves(caches) if type(cache) in (Tap, Ear)]
    hooked: list[tuple[nn.Module, type]] = []
    try:
        for tapped in taps:
            tapped.seen = watcher.attention
        for index, layer in {
            id(x): (i, x) for i, x in reversed([*enumerate(model.layers)])
        }.values():
            linear = [m for m in layer.modules() if m is not layer and has_matrix(m)]
            hooked += [hook(module, watcher.linear) for module in linear]
            hooked.append(hook(layer, partial(watcher.layer, index)))
        yield
    finally:
        for module, cls in reversed(hooked):
            object.__setattr__(module, "__class__", cls)
        for tapped in taps:
            tapped.seen = None


def has_matrix(module: nn.Module) -> bool:
    return any(isinstance(x, mx.array) and x.ndim == 2 for x in module.values())


def hook(module: nn.Module, around: Callable) -> tuple[nn.Module, type]:
    """Have calls of `module` go through `around(call, *args, **kwargs)`. Returns what to undo."""
    cls = type(module)

    def __call__(self, *args, **kwargs):
        return around(partial(cls.__call__, self), *args, **kwargs)

    members = {"__call__": __call__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    object.__setattr__(module, "__class__", type(cls.__name__, (cls,), members))
    return module, cls


class _Watcher:
    def __init__(self, caches: list, see: Callable[[Visit], None]):
        self.caches, self.see = caches, see
        self.visit: Visit | None = None

    def layer(self, index: int, call: Callable, *args, **kwargs):
        given = {id(x) for x in (*args, *kwargs.values())}
        cache = next((i for i, c in enumerate(self.caches) if id(c) in given), None)
        visit = self.visit = Visit(index, cache)
        try:
            out = call(*args, **kwargs)
        finally:
            self.visit = None
        visit.hidden = out[0] if isinstance(out, tuple) else out
        self.see(visit)
        return out

    def linear(self, call: Callable, *args, **kwargs):
        if self.visit is not None and self.visit.calls and args:
            self.visit.inputs.append((call, args[0]))
        return call(*args, **kwargs)

    def attention(self, call: Call) -> None:
        if self.visit is not None:
            self.visit.calls.append(call)
        else:  # a model that calls the parts of its layers
            self.see(Visit(call.view.tap.cache, call.view.tap.cache, [call]))
