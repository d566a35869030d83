"""Estimate what a model and a context need in memory. No framework is imported here."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, replace

from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import parse_kv, stand_in
from mlxkv.models.catalog.shapes import LayerShape

CHUNK = 2048  # tokens that a prefill takes at a time
COMPRESSED = ("full", "latent")  # kinds of layers
MOST_TOKENS = 1 << 24  # of a model that names no limit

TIED = "a sink logit or a cap on scores asks for keys with their mean"


@dataclass(frozen=True)
class ModelPlan:
    """A model as `fit` sees it.

    weights: bytes of them, and where that number comes from. limit: tokens that it was made for, 0 where config.json
    does not say. working: bytes a token of a prefill, in one layer. estimate: why its sizes are guessed, or "".
    """

    name: str
    layers: list[LayerShape]
    weights: int
    weights_source: str
    limit: int = 0
    working: int = 0
    estimate: str = ""

    @property
    def state(self) -> int:
        """Bytes of states of fixed size."""
        return sum(layer.state for layer in self.layers)


@dataclass(frozen=True)
class Need:
    """Bytes at one context with one preset. dropped: by token selection, once the prompt is read. state: of fixed
    size."""

    weights: int
    cache: int
    transient: int
    values: int
    dropped: int = 0
    state: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.transient + self.dropped + self.state


def stored(layer: LayerShape, kv: CacheConfig) -> CacheConfig:
    """Return what `attach` stores of a layer: of bits by direction their stand-in where keys need their mean."""
    name = (layer.tied or layer.kind == "latent") and stand_in(kv)
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
    """Return how the pages of a layer are coded, or None where it stays in 16 bits."""
    coded = stored(layer, kv)
    if not coded.compresses or layer.kind not in COMPRESSED or why_16_bits(layer, kv):
        return None
    return coded.of_latents if layer.kind == "latent" else coded


def bits_in_pages(layer: LayerShape, kv: CacheConfig) -> float:
    """Stored bits per value of a layer inside of pages."""
    coded = _coded(layer, kv)
    return coded.bits_per_value(layer.key_dim, layer.value_dim) if coded else 16.0


def layer_bytes(layer: LayerShape, kv: CacheConfig, tokens: int) -> float:
    """Stored bytes of one layer's cache, full-precision windows and bases that follow the text
    included. With token selection: of a prompt, once it is read."""
    if (kv := _coded(layer, kv)) is None:
        return 2 * layer.values(tokens)
    pages = max(0, tokens - kv.sink - kv.recent - kv.pinned) // kv.page
    packed = layer.values(pages * kv.page) * kv.bits_per_value(layer.key_dim, layer.value_dim) / 8
    bases = kv.basis_bytes(layer.kv_heads, layer.key_dim, layer.value_dim) if pages else 0
    return packed + 2 * layer.values(tokens - pages * kv.page) + bases


def need(plan: ModelPlan, kv: CacheConfig, tokens: int) -> Need:
    """Return what `tokens` tokens need."""
    layers = Counter(plan.layers).items()
    cache = sum(count * layer_bytes(layer, kv, tokens) for layer, count in layers)
    whole = replace(kv, keep=1.0)
    unpruned = sum(count * layer_bytes(layer, whole, tokens) for layer, count in layers)
    one_layer = max(
        (2 * (layer.values(tokens) + tokens * layer.expanded) for layer in plan.layers), default=0
    )
    transient = plan.working * min(CHUNK, tokens) + one_layer
    values = sum(layer.values(tokens) for layer in plan.layers)
    return Need(plan.weights, int(cache), transient, values, int(unpruned - cache), plan.state)


def longest(plan: ModelPlan, kv: CacheConfig, usable: int) -> int:
    """The longest context that fits, at most the model's limit; 0 when nothing does."""
    contexts = range(1, (plan.limit or MOST_TOKENS) + 1)
    return bisect_right(contexts, usable, key=lambda tokens: need(plan, kv, tokens).total)
