"""Estimate what a model and a context need in memory, from config.json alone. No framework."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from mlxkv import untrusted
from mlxkv.console import user_path
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.plans.plan import Plan
from mlxkv.models.catalog import known, numbers
from mlxkv.models.catalog.aliases import HUB, resolve
from mlxkv.models.catalog.folder import SMALL
from mlxkv.models.catalog.shapes import (
    LayerShape,
    activation_bytes,
    context_limit,
    layers_of,
    weight_bytes,
)
from mlxkv.untrusted import Unsound

CHUNK = 2048  # tokens that a prefill takes at a time
COMPRESSED = ("full", "latent")  # kinds of layers
MOST_TOKENS = 1 << 24  # of a model that names no limit

TIED = "a sink logit or a cap on scores asks for keys with their mean"


@dataclass(frozen=True)
class ModelPlan:
    """A model as `fit` sees it."""

    name: str
    config: dict
    layers: list[LayerShape]
    weights: int
    weights_source: str

    @property
    def limit(self) -> int:
        return context_limit(self.config) or 0


@dataclass(frozen=True)
class Need:
    """Bytes at one context with one preset. dropped: by token selection, once the prompt is read."""

    weights: int
    cache: int
    transient: int
    values: int
    dropped: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.transient + self.dropped


def why_16_bits(layer: LayerShape, kv: CacheConfig) -> str | None:
    """Why a layer that a preset compresses in other models stays in 16 bits, or None."""
    if layer.kind == "latent":
        dims = layer.key_dim, layer.value_dim
        return kv.compresses and (kv.why_no_latents or kv.of_latents.why_not(*dims)) or None
    if layer.tied and kv.centred:
        return TIED
    return kv.why_not(layer.key_dim, layer.value_dim) if layer.kind == "full" else None


def bits_in_pages(layer: LayerShape, kv: CacheConfig) -> float:
    """Stored bits per value of a layer inside of pages."""
    if layer.kind not in COMPRESSED or why_16_bits(layer, kv):
        return 16.0
    kv = kv.of_latents if layer.kind == "latent" and kv.compresses else kv
    return kv.bits_per_value(layer.key_dim, layer.value_dim)


def layer_bytes(layer: LayerShape, kv: CacheConfig, tokens: int) -> float:
    """Stored bytes of one layer's cache, full-precision windows and bases that follow the text
    included. With token selection: of a prompt, once it is read."""
    if kv.compresses and why_16_bits(layer, kv) is None and layer.kind in COMPRESSED:
        kv = kv.of_latents if layer.kind == "latent" else kv
    else:
        return 2 * layer.values(tokens)
    pages = max(0, tokens - kv.sink - kv.recent - kv.pinned) // kv.page
    packed = layer.values(pages * kv.page) * kv.bits_per_value(layer.key_dim, layer.value_dim) / 8
    bases = kv.basis_bytes(layer.kv_heads, layer.key_dim, layer.value_dim) if pages else 0
    return packed + 2 * layer.values(tokens - pages * kv.page) + bases


def need(plan: ModelPlan, kv: CacheConfig | Plan, tokens: int) -> Need:
    """What `tokens` tokens need."""
    own = [(layer, kv.at(i)) for i, layer in enumerate(plan.layers)]
    cache = sum(layer_bytes(layer, one, tokens) for layer, one in own)
    whole = sum(layer_bytes(layer, replace(one, keep=1.0), tokens) for layer, one in own)
    one_layer = max(
        (2 * (layer.values(tokens) + tokens * layer.expanded) for layer in plan.layers), default=0
    )
    transient = activation_bytes(plan.config, min(CHUNK, tokens)) + one_layer
    values = sum(layer.values(tokens) for layer in plan.layers)
    return Need(plan.weights, int(cache), transient, values, int(whole - cache))


def longest(plan: ModelPlan, kv: CacheConfig | Plan, usable: int) -> int:
    """The longest context that fits, at most the model's limit; 0 when nothing does."""
    low, high = 0, plan.limit or MOST_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if need(plan, kv, middle).total <= usable:
            low = middle
        else:
            high = middle - 1
    return low


def read_plan(model: str, config: str | None) -> ModelPlan:
    """Finds config.json and the weights' size: a file, a local folder, the hub's cache, for an alias that is
    not there its known shape, or the hub."""
    if config is not None:
        data = _read_config(user_path(config, "--config"), "--config")
        return _plan(str(config), data, None)
    from mlxkv.models.catalog.locate import cached, locate

    alias = model.strip()
    here = alias in HUB and (resolve(alias).folder or cached(HUB[alias]))
    if alias in HUB and alias in known.CONFIGS and not here:
        return _known(alias)
    place = locate(model)
    data = _read_config(place.config, f"--model {model}")
    return _plan(place.name, data, place.weights)


def _known(alias: str) -> ModelPlan:
    """An alias that was not downloaded."""
    config = known.CONFIGS[alias] | {"quantization": known.QUANTIZATION}
    more = known.MORE_PARAMETERS.get(alias, 0) * 4.5 / 8
    weights = weight_bytes(config) + int(more)
    source = "estimated from the model's shape: it is not downloaded"
    return ModelPlan(HUB[alias], config, layers_of(config), weights, source)


def _plan(name: str, config: dict, weights: int | None) -> ModelPlan:
    source = "from the files" if weights else "estimated from config.json"
    try:
        return ModelPlan(name, config, layers_of(config), weights or weight_bytes(config), source)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"[config.json] sizes that do not fit together ({error}); got {name}"
        ) from None


def _read_config(path: Path, where: str) -> dict:
    path = path / "config.json" if path.is_dir() else path
    try:
        data = untrusted.read_json(path, SMALL, infinity=True)
        if not isinstance(data, dict):
            raise Unsound("is not the config of a model")
        numbers.check(data, numbers.LAYERS)
    except FileNotFoundError:
        raise UserError(f"[{where}] no such file; got {str(path)!r}") from None
    except Unsound as error:
        raise UserError(f"[{where}] {str(path)!r} {error}") from None
    return data
