"""`Steps`: the decode steps of one model. Each kind of step is traced once, then replayed.

A replay costs the host only MLX's submission of the graph to the device; without it, Python rebuilds the graph for
every token, which for many models takes longer than the GPU's work.
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
from mlxkv.cache.latent import BatchedLatentCache, LatentKVCache, LatentStaticCache
from mlxkv.cache.static import (
    CacheProxy,
    CompressedStaticCache,
    NotYet,
    RowsProxy,
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

SWITCH = "MLXKV_COMPILE"  # environment variable; 0: Python builds every step
MOST_TRACES = 64  # per kind of step: above this, all are dropped and made again when needed
MOST_KINDS = 256  # likewise: kernels split work differently as a batch grows
FORMS = {
    CompressedKVCache: CompressedStaticCache,
    LatentKVCache: LatentStaticCache,
    RotatingKVCache: Ring,
    KVCache: Plain,
    ArraysCache: Arrays,
    BatchRotatingKVCache: PaddedRing,
}
# The caches of single sequences in a batch.
ROWS = {BatchedKVCache: CompressedKVCache, BatchedLatentCache: LatentKVCache}


def _why_off() -> str | None:
    switch = os.environ.get(SWITCH)
    if switch == "0":
        return f"{SWITCH}=0"
    if launch.device_type() == "cpu" and switch != "1":
        # MLX would run a C++ compiler on some 26 kernels before the second token.
        return f"traced steps start a compiler on a CPU; {SWITCH}=1 turns them on"
    return None


class Steps:
    """The traced steps of one model.

    off: why tracing is off, or None. refused: untraceable lists of caches, by their classes -> why. traced: number of
    traces made. replayed: number of steps run by a trace, its first run included. waits_for: why the last step could
    not be traced yet, or None. compiles: False to run steps of fixed shapes without tracing them, for tests of kernels
    that cannot be traced.
    """

    def __init__(self):
        self.off = _why_off()
        self.refused: dict[tuple[type, ...], str] = {}
        self.traced, self.replayed, self.compiles = 0, 0, True
        self.waits_for: str | None = None
        self._kinds: dict[tuple, StepKind] = {}
        self._weights: Weights | None = None
        self._counters = tiles.times_forgotten()
        self.lock = RLock()  # of the model: tracing replaces its weights
        self._allows_places = False  # whether the model's code has already added places for arrays

    def forget(self) -> None:
        """Drop all traces. Call it in a thread that made some, before it ends: their arrays belong to its streams."""
        self._kinds.clear()

    def __call__(
        self, model, call: Callable, tokens: mx.array, caches: Sequence
    ) -> mx.array | None:
        """Return the result of `call(model, tokens, cache=caches)` by a traced step; None, with no side effects, if
        this step cannot be traced. tokens: [B, L]."""
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
            logits = call(model, tokens, cache=caches)  # an error of the caller is raised here
            self.refused[classes] = str(error)
            return logits

    @property
    def why_not(self) -> str | None:
        """Return why Python always builds some of this model's steps, or None if no such step is known."""
        return self.off or next(iter(self.refused.values()), None)

    @property
    def state(self) -> str:
        """Return how this model's steps run, in a few words."""
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
        """Run a step in Python, and check whether the model's code assigns unchanged values."""
        contents = list(map(content, error.places))
        logits = call(model, tokens, cache=caches)
        if any(was is None for was in contents) and not self._allows_places:
            self._allows_places = True  # allowed once
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
    """Steps that differ only in shapes and indices. run: the compiled trace. output: the class around logits that the
    model's code returns (mlx-vlm), or None."""

    def __init__(self, weights: Weights, call: Callable, compiles: bool):
        self.weights, self.call, self.compiles, self.traces = weights, call, compiles, 0
        self.output: type | None = None
        self._current: tuple = ()  # of the current step
        self._shared: list[int] = []  # indices of caches that several layers read
        self._carried: dict[tuple[int, ...], mx.array] = {}
        self.run = mx.compile(self._trace) if compiles else self._trace

    def __call__(self, tokens, weights, statics, caches, places, values, advances):
        """Return the logits, and the arrays written by each static cache's proxy."""
        # The last step left the indices on the device: on CUDA, uploading them takes longer than the rest of a replay
        # on the host.
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
        if _seed() is not seed:  # a replay would draw the same numbers again
            raise Untraceable("the model's code draws random numbers")
        self._shared = [i for i, proxy in enumerate(stands) if getattr(proxy, "shared", False)]
        self._wait(statics)
        advanced = [
            array + mx.array(by, mx.int32) if by else array
            for array, by in zip(indices, advances, strict=True)
        ]
        return logits, [_outputs_of(proxy) for proxy in stands], advanced

    def _logits(self, out) -> mx.array:
        """Return only the logits. Raises Untraceable if the model's code returns more."""
        if isinstance(out, mx.array):
            return out
        fields = vars(out) if is_dataclass(out) else {}
        extras = [name for name, x in fields.items() if name != "logits" and x is not None]
        if extras or not isinstance(fields.get("logits"), mx.array):
            raise Untraceable(f"the model's code returns more than logits ({', '.join(extras)})")
        self.output = type(out)
        return fields["logits"]

    def _wait(self, statics: Sequence[StaticCache]) -> None:
        """Raise NotYet if this step quantizes a page that other layers read without writing to the cache: a trace would
        use its exact tokens, these layers its codes."""
        if any(statics[i].quantizes for i in self._shared):
            raise NotYet("layers share a cache that quantizes a page")


@contextmanager
def _reasons() -> Iterator[None]:
    """Turn errors of the model's code in a trace into the reason for not tracing."""
    try:
        yield
    except (NotYet, Assigned, Untraceable):
        raise
    except UserError as error:  # from our views, where an array is expected
        raise Untraceable(str(error)) from None
    except Exception as error:
        if "transformations" in str(error):  # MLX's message if code reads index values from arrays
            error = "the model's code looks at numbers that only the device has"
        else:
            error = f"the model's code fails in a trace: {type(error).__name__}: {error}"
        raise Untraceable(error) from None


def _seed() -> mx.array:
    return cast(list[mx.array], mx.random.state)[0]  # typed as object in mlx's stub


def _equal(x: mx.array | None, y: mx.array | None) -> bool:
    if x is None or y is None or x.shape != y.shape:
        return False
    return bool(mx.array_equal(x, y))


def _outputs_of(proxy: CacheProxy) -> list[mx.array]:
    if proxy.written is None:
        raise Untraceable("a layer does not write to its cache")
    return list(proxy.written)


def static_caches_of(cache, new: int) -> list[StaticCache]:
    """Return the static caches of a cache, of each member of a list of caches, or of each sequence that is read on its
    own. Raises NotYet, Untraceable."""
    if isinstance(cache, CacheList):
        return [static for member in cache.caches for static in static_caches_of(member, new)]
    if (row := ROWS.get(type(cache))) is not None:
        return (
            [UnusedStaticCache()] if cache.empty() else list(of_batch(cache, new, row, FORMS[row]))
        )
    kind = FORMS.get(type(cache))
    if kind is None and isinstance(cache, ArraysCache):
        kind = Arrays
    if kind is None:
        raise Untraceable(f"no static form of {type(cache).__name__}")
    return [UnusedStaticCache() if cache.empty() else kind(cache, new)]


def _in_place(cache, stands):
    """Return the proxies at the places of the caches."""
    if isinstance(cache, BatchedKVCache) and cache.buffers is None and not cache.empty():
        return RowsProxy(type(cache), [next(stands) for _ in cache.rows])
    if not isinstance(cache, CacheList):
        return next(stands)
    out = CacheList.__new__(CacheList)
    out.caches = tuple(_in_place(member, stands) for member in cache.caches)
    return out


def grouped(statics: Sequence[StaticCache]):
    """Return the group of each static cache, the indices of each group, and their increments."""
    groups, places, members = {}, [], []
    for i, static in enumerate(statics):
        group = groups.get(static.lockstep)
        if group is not None and members[group].state != static.state:
            group = None  # a cache that was trimmed alone
        if group is None:
            group = groups[static.lockstep if static.lockstep not in groups else i] = len(members)
            members.append(static)
        places.append(group)
    return (
        tuple(places),
        [static.indices for static in members],
        tuple(static.advance for static in members),
    )
