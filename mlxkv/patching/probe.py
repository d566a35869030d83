"""Find the contents of each cache of a model by a dry run, which computes nothing.

MLX is lazy: calling the model builds a graph, which is discarded. Caches return a `Handle` in place of keys and
values, so the run also shows whether the model's code only passes them to attention.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import __version__ as mlx_lm_version

from mlxkv.patching.record import PROMPT, record
from mlxkv.patching.trees import PLAIN, Place, leaves, own_caches, put


class Misuse(AttributeError):
    """The model's code used a cache, or its return value, in a way that ours do not support."""


@dataclass(frozen=True)
class ProbedShape:
    """The numbers that one cache stores per token: `heads` x (`key_dim` + `value_dim`) numbers of `dtype`.

    queries: number of query heads that read it, 0 if none. sinks: whether it is read with attention sinks. latent:
    whether it contains latents as keys and rotary keys as values. selects: whether the model's code selects tokens
    from it. softcap: of its scores, or None.
    """

    heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    queries: int = 0
    sinks: bool = False
    latent: bool = False
    selects: bool = False
    softcap: float | None = None


class Handle:
    """Stand-in for the keys or values of one cache; any use except attention raises Misuse."""

    def __init__(self, cache: ProbeCache):
        self._cache = cache

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[B, G, T, D], the same for keys and values, as in our view."""
        shape = self._cache.probed
        if shape.key_dim != shape.value_dim:
            raise Misuse("reads the shape of the cached keys or values, which differ in width")
        return 1, shape.heads, self._cache.offset, shape.key_dim

    @property
    def dtype(self) -> mx.Dtype:
        return self._cache.probed.dtype

    def astype(self, dtype: mx.Dtype) -> Handle:
        """Return `self`: attention casts its inputs."""
        return self

    def attended(
        self, queries, values, cache=None, scale: float = 1.0, mask=None, sinks=None, softcap=None
    ) -> mx.array:
        """Return zeros [B, H, L, Dv] for queries [B, H, L, D]. mlx-lm's signature."""
        if type(values) is not Handle or values._cache is not self._cache:
            raise Misuse("attends with keys and values of different caches")
        self._cache.waiting = False
        shape = self._cache.probed
        heads, has_sinks = queries.shape[1], sinks is not None
        self._cache.shape = replace(shape, queries=heads, sinks=has_sinks, softcap=softcap)
        return mx.zeros((*queries.shape[:3], self._cache.mixed_dim), queries.dtype)

    def __getattr__(self, name: str):
        raise Misuse(f"uses .{name} of the cached keys or values")


class ProbeCache:
    """A cache with the methods that models call in a forward pass; it stores nothing."""

    def __init__(self, place: Place):
        self.place = place
        self.offset = 0
        self.shape: ProbedShape | None = None
        self.waiting = False  # for attention over its handles

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Handle, Handle]:
        self.shape = ProbedShape(keys.shape[1], keys.shape[3], values.shape[3], values.dtype)
        self.offset += keys.shape[2]
        self.waiting = True
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Handle, Handle]:
        return Handle(self), Handle(self)

    @property
    def probed(self) -> ProbedShape:
        """The shape, once updated."""
        if self.shape is None:
            raise Misuse("reads the keys or values of a cache before any are written")
        return self.shape

    @property
    def mixed_dim(self) -> int:
        """Dims of the output of attention."""
        return self.probed.value_dim

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        if window_size is None and (N == 1 or not return_array):
            return None if N == 1 else "causal"
        return mx.ones((N, self.offset + N), mx.bool_)

    def __getattr__(self, name: str):
        raise Misuse(f"uses .{name} of its cache")


@dataclass
class Findings:
    """shapes: of the caches that can be replaced. refused: why the others cannot."""

    shapes: dict[Place, ProbedShape]
    refused: dict[Place, str]


def probe(model, places: list[Place], kind: type[ProbeCache] = ProbeCache) -> Findings:
    """Find the shapes of the model's own caches at `places`, all plain KV caches, and whether ours can replace them.
    kind: class of the probing caches.

    The attention function must be patched. Any failure becomes a reason and is not raised.
    """
    findings = Findings({}, {})
    while pending := [place for place in places if place not in findings.refused]:
        caches = own_caches(model)
        probes = [kind(place) for place in pending]
        for cache in probes:
            put(caches, cache.place, cache)
        if (error := record(model, caches, (PROMPT, 1)).error) is not None:
            waiting = [cache for cache in probes if cache.waiting]
            for cache in waiting or probes:
                findings.refused[cache.place] = _reason(error, bool(waiting))
            continue
        for cache in probes:
            if cache.shape is None:
                findings.refused[cache.place] = "a dry run of the model never used this cache"
            elif cache.waiting:
                findings.refused[cache.place] = "the model computes attention in its own way"
            else:
                findings.shapes[cache.place] = cache.shape
        break
    return findings


def _reason(error: Exception, waiting: bool) -> str:
    if isinstance(error, Misuse):
        return f"the model {error}"
    text = (str(error).strip().splitlines() or [""])[0][:80]
    if waiting:
        return f"the model uses cached keys or values as arrays ({type(error).__name__}: {text})"
    return f"a dry run of the model failed ({type(error).__name__}: {text})"


def files_of(model: nn.Module) -> list[ModuleType]:
    """Return the Python modules that define the classes of `model` and its layers, bases included."""
    names = {cls.__module__ for _, module in model.named_modules() for cls in type(module).__mro__}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


# -- Layers with multi-head latent attention (MLA): which caches hold latents, by the structure of the model.
#
# mlx-lm's code for MLA passes a cache the latent of each token and the rotary key shared by all heads. It computes
# the scores of rotary keys itself. For one new token it attends to the latents with absorbed queries; for several it
# expands them to the keys and values of every head, and so needs an array.

ABSORBED = ("embed_q", "unembed_out")  # maps from heads to latents and back, in mlx-lm's attention
INDEX = "indexer"  # a sparse index, with a cache of its own keys (DeepSeek-V3.2)
INDEX_KEYS = "the keys of a sparse index stay in full precision"


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return the attention modules of `model` that attend to latents, in the order of layers."""
    keyed = [
        ([(part.isdigit(), int(part) if part.isdigit() else part) for part in path.split(".")], m)
        for path, m in model.named_modules()
        if all(name in m for name in ABSORBED)
    ]
    return [m for _, m in sorted(keyed, key=lambda pair: pair[0])]


def find_latents(model: nn.Module, places: list[Place]) -> Findings | None:
    """Return the findings for the plain caches at `places` of a model with MLA; None for other models.

    The attention function must be patched.
    """
    modules = modules_of(model)
    if not modules:
        return None
    indexed = any(INDEX in m for m in modules)
    index = [place for place in places if indexed and len(place) > 1 and place[1]]
    latents = [place for place in places if place not in index]
    findings = probe(model, latents, _IndexedProbe if indexed else LatentProbe)
    findings.refused |= dict.fromkeys(index, INDEX_KEYS)
    return findings


class LatentProbe(ProbeCache):
    """A cache of latents in a dry run."""

    selects = False

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        if keys.shape[1] != 1 or values.shape[1] != 1:
            raise Misuse("caches keys of several heads beside latents")
        shape = ProbedShape(
            1, keys.shape[3], values.shape[3], keys.dtype, latent=True, selects=self.selects
        )
        self.shape = shape if self.shape is None else replace(shape, queries=self.shape.queries)
        self.offset += keys.shape[2]
        rotary = mx.zeros((1, 1, self.offset, values.shape[3]), values.dtype)
        if self.selects or keys.shape[2] > 1:
            return mx.zeros((1, 1, self.offset, keys.shape[3]), keys.dtype), rotary
        self.waiting = True
        return Handle(self), rotary

    @property
    def mixed_dim(self) -> int:
        return self.probed.key_dim


class _IndexedProbe(LatentProbe):
    selects = True
    keys = mx.zeros(0)  # the model's code makes them depend on its index


# -- The families of mlx-lm that cannot be compressed, by their file in `mlx_lm/models`, and why.
#
# A family can be compressed if it passes the return value of `cache.update_and_fetch` only to
# `scaled_dot_product_attention` or to a later layer, if its own code is patched (`patching.OWN_CODE`), or if it
# caches latents. A test derives this table from the source of the installed mlx-lm.

OWN_CACHE = "its code stores compressed groups of tokens in a cache of its own"
NO_PROMPTS = "its code in mlx-lm reads no prompt (adds the word causal to scores)"
ARRAYS = "its code needs the cached keys as an array ({})"

REFUSED: dict[str, str] = {
    "deepseek_v41": OWN_CACHE,
    "minimax_m3_vl": ARRAYS.format("selects blocks of keys by an index"),
    "olmo": NO_PROMPTS,
    "phi3small": ARRAYS.format("sees blocks of tokens"),
    "plamo": ARRAYS.format("repeats heads"),
}

# Families whose code computes on cached latents (MLA): handled by `find_latents`.
LATENTS = {
    *("bailing_hybrid", "bailing_moe_v3", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"),
    *("kimi_k3", "kimi_linear", "longcat_flash", "mistral4"),
}

# Layers that reuse another layer's keys read its `.state` before 0.32, `keys_and_values()` since.
REFUSED_BEFORE_0_32: dict[str, str] = {
    "afm7": ARRAYS.format("reads the state of a cache of another layer"),
    "gemma3n": ARRAYS.format("reads the state of a cache of another layer"),
}


def refusal(files: list[str], mlx_lm_version: str) -> str | None:
    """Return why a model with classes in `files` (`mlx_lm.models.llama`) cannot be compressed, or None."""
    table = REFUSED
    if tuple(int(part) for part in mlx_lm_version.split(".")[:2]) < (0, 32):
        table = REFUSED | REFUSED_BEFORE_0_32
    for file in files:
        package, _, family = file.rpartition(".")
        if package == "mlx_lm.models" and family in table:
            return f"{family}: {table[family]}"
    return None


# -- all of it


def find(model: nn.Module) -> Findings:
    """Find the shapes of the model's own plain caches, and why ours cannot replace some.

    The attention function must be patched (`patch.patch`).
    """
    plain = [place for place, cache in leaves(own_caches(model)) if type(cache).__name__ == PLAIN]
    if reason := refusal([file.__name__ for file in files_of(model)], mlx_lm_version):
        return Findings({}, dict.fromkeys(plain, reason))
    return find_latents(model, plain) or probe(model, plain)
