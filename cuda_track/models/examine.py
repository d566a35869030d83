"""Which layers of a model are compressed, and why the others are not: never silence."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from cuda_track.cache import choose
from cuda_track.models import dryrun, latent, transformers_compat
from cuda_track.models.attending import name_for
from cuda_track.models.layers import has_class, holds_state, plain_layers, replaceable
from cuda_track.models.transformers_compat import share_of
from mlxkv.catalog.reports import (
    ASKED_FOR,
    CAPPED,
    LATENT,
    SINKS,
    LayerReport,
    compressed,
    of_latents,
)
from mlxkv.catalog.shapes import text_config
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig

KV_HEADS = "num_key_value_heads", "num_global_key_value_heads"  # the second: Gemma 4's full layers


@dataclass(frozen=True)
class Examined:
    """One cache of a model. kind: of its layer. sizes: kv heads in this process, key dim, value dim.

    latent: it holds latents and rotary keys (MLA). capped: scores are (softcap). sinks: a logit stands beside
    them. reason: why it cannot be replaced, or None.
    """

    kind: str
    grows: bool
    reason: str | None
    sizes: tuple[int, int, int] = (0, 0, 0)
    capped: bool = False
    sinks: bool = False
    latent: bool = False

    def fitting(self, config: CacheConfig) -> CacheConfig:
        """Return what `config` is for this cache."""
        return config.of_latents if self.latent else config

    def report(self, index: int, config: CacheConfig, device: torch.device) -> LayerReport:
        reason = self.reason if config.compresses else ASKED_FOR
        if self.capped and config.needs_queries:
            reason = reason or "queries of capped scores cannot be observed"
        if config.centred and (self.capped or self.sinks):
            reason = reason or (CAPPED if self.capped else SINKS)
        if self.latent:
            reason = reason or config.why_no_latents
        if reason:
            return LayerReport(index, self.kind, False, reason, attention="sdpa", grows=self.grows)
        label, fitted = config.label, self.fitting(config)
        if self.latent:
            label, why_ops = of_latents(config), "latents have no kernel"
        else:
            why_ops = choose.why_not(config, self.sizes[1:], device)
        if self.capped:
            why_ops = "capped scores have no kernel"
        kernel = f"torch ops ({why_ops})" if why_ops else choose.TRITON.capitalize()
        return compressed(index, self.kind, fitted, label, self.sizes, kernel)


def examine(model: PreTrainedModel, config: CacheConfig) -> list[Examined]:
    """Find what each cache of `model` is, by a dry run, and leave attention ours.

    A configuration that compresses nothing needs no run. Raises UserError for kv heads that the processes
    of a model cannot share.
    """
    _check_share(model)
    try:
        layers = plain_layers(model)
    except Exception as error:  # configurations that name no layers
        return [Examined("unknown", True, f"transformers makes no cache for this model ({error})")]
    if not config.compresses:
        return [_of_class(layer) for layer in layers]
    growing = [i for i, layer in enumerate(layers) if replaceable(layer)]
    probes: dict[int, dryrun.Probe] = {}
    if growing and not _takes_caches(model):
        return [_of_class(layer, "the model takes no cache of transformers") for layer in layers]
    if growing:
        if model._can_set_attn_implementation():
            model.set_attn_implementation(name_for(model.config._attn_implementation))
        latent.patch(model)
        probes = dryrun.run(model, layers, growing)
    ranks = bool(text_config(model.config.to_dict()).get("kv_lora_rank"))
    return [
        _of_probe(probes[i], ranks, share_of(model).size > 1) if i in probes else _of_class(layer)
        for i, layer in enumerate(layers)
    ]


def _of_probe(probe: dryrun.Probe, ranks: bool, shared: bool) -> Examined:
    """Return what a dry run says of a layer. ranks: the model's configuration speaks of latents. shared: several
    processes have the model."""
    reason = probe.verdict
    if not probe.calls and not probe.refused:
        return Examined("not used", False, "the model uses no cache of transformers")
    if probe.latents is not None:
        sizes = probe.sizes or (0, 0, 0)
        refusal = "more than softmax over latents" if probe.capped or probe.sinks else None
        if shared:
            refusal = "latents of a model in several processes: not supported"
        return Examined(LATENT, True, reason or refusal, sizes, latent=True)
    if reason and ranks and probe.refused:
        return Examined(LATENT, True, f"latent cache that grows: not supported ({reason})")
    return Examined("full", True, reason, probe.sizes or (0, 0, 0), probe.capped, probe.sinks)


def _of_class(layer, reason: str | None = None) -> Examined:
    """Return what the class of a layer's cache says. reason: why a plain one that grows is not replaced."""
    state = holds_state(layer)
    if isinstance(layer, DynamicSlidingWindowLayer):
        suffix = " beside a state" if state else ""
        return Examined(f"sliding window {layer.sliding_window}{suffix}", False, "small by nature")
    if has_class(layer, "DynamicIndexedLayer"):
        return Examined("indexed", True, "indexed cache that grows: not supported")
    if state and isinstance(layer, CacheLayerMixin):
        return Examined(
            "full beside a state", True, "a cache that grows beside a state: not supported"
        )
    if state:
        return Examined("state", False, "constant size")
    if replaceable(layer):
        return Examined("full", True, reason)
    if has_class(layer, "DummyLayer"):
        return Examined("no cache of its own", False, "nothing is stored")
    return Examined(
        f"cache of class {type(layer).__name__}", True, "mlxkv does not know this class"
    )


def _check_share(model: PreTrainedModel) -> None:
    """Raise UserError where the processes of a model cannot share its kv heads."""
    if (size := share_of(model).size) == 1:  # some configurations have no one number for all layers
        return
    config = model.config.get_text_config()
    for heads in filter(None, (getattr(config, name, None) for name in KV_HEADS)):
        if heads % size:
            raise UserError(
                f"[attach] {heads} kv heads cannot be shared by {size} processes; choose a tp_size "
                "that divides them"
            )


def _takes_caches(model: PreTrainedModel) -> bool:
    names = inspect.signature(model.forward).parameters
    return transformers_compat.NAME in names or any(p.kind is p.VAR_KEYWORD for p in names.values())


def implementations(model: PreTrainedModel) -> list[tuple[PreTrainedConfig, str | None]]:
    """Return the configurations of a model and of its parts, with the names of their attention functions."""
    queue = [m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
    configs: dict[int, PreTrainedConfig] = {}
    while queue:
        config = queue.pop()
        if config is not None and id(config) not in configs:
            configs[id(config)] = config
            queue += [getattr(config, name, None) for name in config.sub_configs]
    return [(config, config._attn_implementation_internal) for config in configs.values()]


def put_back(model: PreTrainedModel, names: list[tuple[PreTrainedConfig, str | None]]) -> None:
    """Undo what `examine` did to attention."""
    latent.unpatch(model)
    for config, name in names:
        config._attn_implementation_internal = name
