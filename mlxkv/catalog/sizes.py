"""Estimate what a model and a context need in memory. No framework is imported here."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

from mlxkv.catalog.shapes import LayerShape
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import fallback_preset, parse_kv
from mlxkv.formats.sizes import CacheShape

CHUNK = 2048  # tokens per prefill chunk
COMPRESSED = ("full", "latent")  # kinds of layers
MOST_TOKENS = 1 << 24  # limit for a model that names none

TIED = "a sink logit or a cap on scores asks for keys with their mean"


@dataclass(frozen=True)
class ModelPlan:
    """A model as `fit` sees it.

    weights: their bytes, and the source of that number. limit: the context it was made for, 0 if not in config.json.
    working: bytes per prefill token, in one layer. estimate: why its sizes are guessed, or "". records: whether
    kernels read the pages of its caches here.
    """

    name: str
    layers: list[LayerShape]
    weights: int
    weights_source: str
    limit: int = 0
    working: int = 0
    estimate: str = ""
    records: bool = False

    @property
    def state(self) -> int:
        """Bytes of fixed-size states."""
        return sum(layer.state for layer in self.layers)


@dataclass(frozen=True)
class Need:
    """Bytes at one context with one preset. cache: allocated once the context is read, CHUNK tokens at a time.
    in_use: of the allocated bytes. dropped: by token selection, once the prompt is read. state: of fixed size."""

    weights: int
    cache: int
    in_use: int
    transient: int
    values: int
    dropped: int = 0
    state: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.transient + self.dropped + self.state


def stored(layer: LayerShape, kv: CacheConfig) -> CacheConfig:
    """Return the format in which `attach` stores a layer: the fallback of mixed bits if keys need their mean."""
    name = (layer.tied or layer.kind == "latent") and fallback_preset(kv)
    return parse_kv(name) if name else kv


def why_16_bits(layer: LayerShape, kv: CacheConfig) -> str | None:
    """Return why a layer that a preset compresses in other models stays in 16 bits, or None."""
    kv = stored(layer, kv)
    if layer.reason:
        return layer.reason if kv.compresses and layer.kind != "index" else None
    if layer.kind == "latent":
        dims = layer.key_dim, layer.value_dim
        return kv.compresses and (kv.why_no_latents or kv.of_latents.why_not(*dims)) or None
    if layer.tied and kv.centred:
        return TIED
    return kv.why_not(layer.key_dim, layer.value_dim) if layer.kind == "full" else None


def _coded(layer: LayerShape, kv: CacheConfig) -> CacheConfig | None:
    """Return the format of a layer's pages, or None if it stays in 16 bits."""
    coded = stored(layer, kv)
    if not coded.compresses or layer.kind not in COMPRESSED or why_16_bits(layer, kv):
        return None
    return coded.of_latents if layer.kind == "latent" else coded


def bits_in_pages(layer: LayerShape, kv: CacheConfig) -> float:
    """Return stored bits per value inside a layer's pages."""
    coded = _coded(layer, kv)
    return coded.bits_per_value(layer.key_dim, layer.value_dim) if coded else 16.0


def cache_shape(layer: LayerShape, kv: CacheConfig, records: bool = False) -> CacheShape:
    """Return the shape of the cache that `attach` makes for a layer, without its state. records: whether kernels
    read it."""
    return CacheShape(
        *(layer.kv_heads, layer.key_dim, layer.value_dim, _coded(layer, kv), layer.kind),
        window=layer.window,
        queries=layer.queries,
        records=records,
    )


def layer_bytes(layer: LayerShape, kv: CacheConfig, tokens: int) -> int:
    """Return the bytes in use of one layer's cache. With token selection: those of a prompt, once it is read."""
    return cache_shape(layer, kv).held(tokens, prompt=tokens)


def need(plan: ModelPlan, kv: CacheConfig, tokens: int) -> Need:
    """Return the memory for `tokens` tokens."""
    cache = in_use = dropped = cut = 0
    for layer, count in Counter(plan.layers).items():
        shape = cache_shape(layer, kv, plan.records)
        size = shape.allocated(tokens, CHUNK, prompt=tokens)
        cache, in_use = cache + count * size, in_use + count * shape.held(tokens, prompt=tokens)
        # Freed at the first decoded token: by windows and by token selection.
        spare = count * max(0, shape.allocated(tokens, CHUNK) - size)
        dropped, cut = (dropped + spare, cut) if shape.config else (dropped, cut + spare)
    one_layer = max(
        (2 * (layer.values(tokens) + tokens * layer.expanded) for layer in plan.layers), default=0
    )
    transient = plan.working * min(CHUNK, tokens) + one_layer + cut
    values = sum(layer.values(tokens) for layer in plan.layers)
    return Need(plan.weights, cache, in_use, transient, values, dropped, plan.state)


def longest(plan: ModelPlan, kv: CacheConfig, usable: int) -> int:
    """Return the longest context that fits, at most the model's limit; 0 if none does."""
    contexts = range(1, (plan.limit or MOST_TOKENS) + 1)
    return bisect_right(contexts, usable, key=lambda tokens: need(plan, kv, tokens).total)
