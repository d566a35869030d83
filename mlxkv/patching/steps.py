"""`Steps`: the decode steps of one model. Each kind of step is traced once, then replayed.

A replay costs the host what MLX needs to hand the graph to the device; without it, Python builds the graph
of every token anew, which takes longer than a GPU needs for many models.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from threading import RLock
from typing import cast

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)

from mlxkv.cache.attention import DECODE_TOKENS
from mlxkv.cache.batch import BatchedKVCache
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.latent import (
    BatchedLatentCache,
    LatentKVCache,
    SingleStaticLatents,
    of_latent_batch,
)
from mlxkv.cache.static import (
    CacheProxy,
    NotYet,
    SingleStaticCache,
    StaticCache,
    StepIndices,
    Untraceable,
    UnusedStaticCache,
    of_batch,
)
from mlxkv.errors import UserError
from mlxkv.metal import launch, tiles
from mlxkv.patching.plain_caches import Arrays, PaddedRing, Plain, Ring
from mlxkv.patching.traced_weights import Assigned, Weights, content

SWITCH = "MLXKV_COMPILE"  # an environment variable; 0: every step is built by Python
MOST_TRACES = 64  # of one kind of step: beyond, all are dropped and made anew as they are needed
MOST_KINDS = 256  # beyond, too: how work is shared out among kernels changes as a batch grows
FORMS = {
    CompressedKVCache: SingleStaticCache,
    LatentKVCache: SingleStaticLatents,
    RotatingKVCache: Ring,
    KVCache: Plain,
    ArraysCache: Arrays,
    BatchedKVCache: of_batch,
    BatchedLatentCache: of_latent_batch,
    BatchRotatingKVCache: PaddedRing,
}


def _why_off() -> str | None:
    switch = os.environ.get(SWITCH)
    if switch == "0":
        return f"{SWITCH}=0"
    if launch.backend() == "cpu" and switch != "1":
        # MLX would have a C++ compiler build some 26 kernels before the second token.
        return f"traced steps start a compiler on a CPU; {SWITCH}=1 turns them on"
    return None


class Steps:
    """The traced steps of one model.

    off: why there are none, or None. refused: lists of caches, by their classes, that have none -> why.
    traced: how many traces were made. replayed: how many steps went by one, those that made it included.
    waits_for: why the last step could not go by one yet, or None. compiles: False where steps of fixed
    shapes are not traced, but run as they are, for tests of kernels that no trace can hold.
    """

    def __init__(self):
        self.off = _why_off()
        self.refused: dict[tuple[type, ...], str] = {}
        self.traced, self.replayed, self.compiles = 0, 0, True
        self.waits_for: str | None = None
        self._kinds: dict[tuple, StepKind] = {}
        self._weights: Weights | None = None
        self._counters = tiles.times_forgotten()
        self.lock = RLock()  # of the model, whose weights a trace replaces
        self._allows_places = False  # whether the model's code has made places for arrays as it ran

    def forget(self) -> None:
        """Drop all traces. To be called in a thread that has made some, before it ends: the arrays in them
        belong to its streams."""
        self._kinds.clear()

    def __call__(
        self, model, call: Callable, tokens: mx.array, caches: Sequence
    ) -> mx.array | None:
        """Return what `call(model, tokens, cache=caches)` returns, by a traced step; None where this step cannot be
        one, and nothing has changed. tokens: [B, L]."""
        if self.off or not isinstance(caches, (list, tuple)) or not caches:
            return None
        classes = tuple(map(type, caches))
        if classes in self.refused or not isinstance(tokens, mx.array):
            return None
        if tokens.ndim != 2 or not 0 < tokens.shape[1] <= DECODE_TOKENS:
            return None
        try:
            return self._step(model, call, tokens, caches)
        except NotYet as error:
            self.waits_for = str(error)
            return None
        except Assigned as error:
            return self._try(call, model, tokens, caches, error)
        except Untraceable as error:
            logits = call(model, tokens, cache=caches)  # a fault of the caller is raised here
            self.refused[classes] = str(error)
            return logits

    @property
    def why_not(self) -> str | None:
        """Return why some of this model's steps are built by Python for good, or None where none is known to be."""
        return self.off or next(iter(self.refused.values()), None)

    @property
    def state(self) -> str:
        """Return how this model's steps are made, in a few words."""
        by_python = "" if self.why_not is None else f"built by Python: {self.why_not}"
        if self.replayed:
            return f"replayed, some {by_python}" if by_python else "replayed"
        return by_python or "none yet"

    def _step(self, model, call: Callable, tokens: mx.array, caches: Sequence) -> mx.array:
        statics = [
            static for cache in caches for static in static_caches_of(cache, tokens.shape[1])
        ]
        if self.compiles and any(static.emulated for static in statics):
            raise Untraceable("kernels of no GPU")
        weights = self._weights
        arrays = weights.arrays() if weights is not None and weights.model is model else None
        if weights is None or arrays is None:
            weights = self._weights = Weights(model)
            arrays = weights.arrays()
            self._kinds.clear()
        places, values, advances = grouped(statics)
        stream = mx.default_stream(mx.default_device())
        key = str(stream), places, advances, *(static.key for static in statics)
        if self._counters != tiles.times_forgotten() or len(self._kinds) > MOST_KINDS:
            self._kinds.clear()
            self._counters = tiles.times_forgotten()
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = StepKind(weights, call, self.compiles)
        traces = kind.traces
        logits, outputs = kind(tokens, arrays, statics, caches, places, values, advances)
        self.traced += kind.traces - traces
        if kind.traces > MOST_TRACES:
            del self._kinds[key]
        for static, new in zip(statics, outputs, strict=True):
            static.commit(new)
        self.replayed, self.waits_for = self.replayed + 1, None
        return logits if kind.output is None else kind.output(logits=logits)

    def _try(self, call: Callable, model, tokens, caches, error: Assigned) -> mx.array:
        """Take a step by Python, and see whether what the model's code assigns is what was there."""
        contents = list(map(content, error.places))
        logits = call(model, tokens, cache=caches)
        if any(was is None for was in contents) and not self._allows_places:
            self._allows_places = True  # it may make them once
        elif self._weights and all(map(_equal, contents, map(content, error.places))):
            self._weights.harmless(error.places)
        else:
            self.refused[tuple(map(type, caches))] = str(error)
        return logits

    def __deepcopy__(self, memo) -> Steps:
        return Steps()

    def __reduce__(self):
        return Steps, ()


class StepKind:
    """Steps that differ in shapes and indices alone. run: the trace, replayed. output: the class around logits
    that the model's code returns (mlx-vlm), or None."""

    def __init__(self, weights: Weights, call: Callable, compiles: bool):
        self.weights, self.call, self.compiles, self.traces = weights, call, compiles, 0
        self.output: type | None = None
        self._current: tuple = ()  # of the step that is taken
        self._shared: list[int] = []  # indices of the caches that several layers read
        self._carried: dict[tuple[int, ...], mx.array] = {}
        self.run = mx.compile(self._trace) if compiles else self._trace

    def __call__(self, tokens, weights, statics, caches, places, values, advances):
        """Return the logits, and what each static cache's proxy wrote."""
        # The last step has left the indices on the device: uploading them takes CUDA longer than all
        # that a replay does on the host.
        indices = [
            self._carried[integers] if integers in self._carried else mx.array(integers, mx.int32)
            for integers in values
        ]
        self._wait(statics)
        self._current = statics, caches, places, advances
        try:
            arrays = [static.arrays for static in statics]
            logits, outputs, advanced = self.run(tokens, indices, arrays, weights)
        finally:
            self._current = ()
        pairs = zip(values, advances, strict=True)
        states = (tuple(a + b for a, b in zip(*pair, strict=True)) for pair in pairs)
        self._carried = dict(zip(states, advanced, strict=True))
        return logits, outputs

    def _trace(self, tokens, indices, arrays, weights):
        self.traces += 1
        statics, caches, places, advances = self._current
        groups = [StepIndices(array) for array in indices]
        stands = [
            static.proxy(buffers, groups[place])
            for static, buffers, place in zip(statics, arrays, places, strict=True)
        ]
        queue = iter(stands)
        in_trace = [_in_place(cache, queue) for cache in caches]
        seed = _seed()
        with _reasons(), self.weights.replaced(weights):
            logits = self._logits(self.call(self.weights.model, tokens, cache=in_trace))
        if _seed() is not seed:  # a replay would draw the same again
            raise Untraceable("the model's code draws random numbers")
        self._shared = [i for i, proxy in enumerate(stands) if getattr(proxy, "shared", False)]
        self._wait(statics)
        advanced = [
            array + mx.array(by, mx.int32) if by else array
            for array, by in zip(indices, advances, strict=True)
        ]
        return logits, [_outputs_of(proxy) for proxy in stands], advanced

    def _logits(self, out) -> mx.array:
        """Return the logits alone. Raises Untraceable where the model's code returns more."""
        if isinstance(out, mx.array):
            return out
        fields = vars(out) if is_dataclass(out) else {}
        extras = [name for name, x in fields.items() if name != "logits" and x is not None]
        if extras or not isinstance(fields.get("logits"), mx.array):
            raise Untraceable(f"the model's code returns more than logits ({', '.join(extras)})")
        self.output = type(out)
        return fields["logits"]

    def _wait(self, statics: Sequence[StaticCache]) -> None:
        """Raise NotYet where a page is quantized that layers then read without writing to the cache: a trace
        has its exact tokens, these layers its codes."""
        if any(statics[i].quantizes for i in self._shared):
            raise NotYet("layers share a cache that quantizes a page")


@contextmanager
def _reasons() -> Iterator[None]:
    """Return what a model's code raises in a trace is why there is none."""
    try:
        yield
    except (NotYet, Assigned, Untraceable):
        raise
    except UserError as error:  # of our views, where an array is expected
        raise Untraceable(str(error)) from None
    except Exception as error:
        if "transformations" in str(error):  # says MLX where code looks at the indices in arrays
            error = "the model's code looks at numbers that only the device has"
        else:
            error = f"the model's code fails in a trace: {type(error).__name__}: {error}"
        raise Untraceable(error) from None


def _seed() -> mx.array:
    return cast(list[mx.array], mx.random.state)[0]  # which mlx's stub has as an object


def _equal(x: mx.array | None, y: mx.array | None) -> bool:
    if x is None or y is None or x.shape != y.shape:
        return False
    return bool(mx.array_equal(x, y))


def _outputs_of(proxy: CacheProxy) -> list[mx.array]:
    if proxy.written is None:
        raise Untraceable("a layer does not write to its cache")
    return list(proxy.written)


def static_caches_of(cache, new: int) -> list[StaticCache]:
    """Return the static caches of a cache, of each in a list of caches. Raises NotYet, Untraceable."""
    if isinstance(cache, CacheList):
        return [static for member in cache.caches for static in static_caches_of(member, new)]
    kind = FORMS.get(type(cache))
    if kind is None and isinstance(cache, ArraysCache):
        kind = Arrays
    if kind is None:
        raise Untraceable(f"no static form of {type(cache).__name__}")
    return [UnusedStaticCache() if cache.empty() else kind(cache, new)]


def _in_place(cache, stands):
    """Return the proxys in the places of the caches."""
    if not isinstance(cache, CacheList):
        return next(stands)
    out = CacheList.__new__(CacheList)
    out.caches = tuple(_in_place(member, stands) for member in cache.caches)
    return out


def grouped(statics: Sequence[StaticCache]):
    """Return the group of each static cache, then the indices of each group and their increments."""
    groups, places, members = {}, [], []
    for i, static in enumerate(statics):
        group = groups.get(static.lockstep)
        if group is not None and members[group].state != static.state:
            group = None  # a cache that was taken back alone
        if group is None:
            group = groups[static.lockstep if static.lockstep not in groups else i] = len(members)
            members.append(static)
        places.append(group)
    return (
        tuple(places),
        [static.indices for static in members],
        tuple(static.advance for static in members),
    )
