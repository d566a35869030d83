"""Which layers of a model are compressed, and why the others are not: never silence."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from cuda_track.cache import choose
from cuda_track.models import dryrun, handing, latent
from cuda_track.models.attending import name_for
from cuda_track.models.layers import has_class, holds_state, plain_layers, replaceable
from cuda_track.models.parallel import share_of
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig
from mlxkv.models.catalog.reports import (
    ASKED_FOR,
    CAPPED,
    LATENT,
    SINKS,
    LayerReport,
    compressed,
    of_latents,
)
from mlxkv.models.catalog.shapes import DEPTH, HEADS, WIDTH, LayerShape, text_config

# Model types whose sliding layers mlx-lm keeps in a rotating cache of the window's size. In the
# others it keeps the whole context, whatever config.json says about windows.
ROTATING = {
    *("gemma3_text", "gemma3", "gemma3n_text", "gemma3n", "gemma4_text", "gemma4", "gpt_oss"),
    *("cohere2", "llama", "ministral3", "mistral3", "olmo3", "exaone4", "exaone_moe", "mellum"),
    *("afmoe", "laguna", "iquestloopcoder", "mimo_v2_flash", "step3p5"),
}
# Model types of which mlx-lm caches latents (MLA). Of others with a kv_lora_rank it caches keys and values.
LATENTS = {
    *(
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "kimi_k25",
        "kimi_k3",
        "kimi_vl",
    ),
    *("kimi_linear", "longcat_flash", "longcat_flash_ngram", "bailing_hybrid", "bailing_moe_v3"),
    *("mistral4", "kimi_k2"),
}
STATES = ("linear_attention", "mamba", "conv", "recurrent", "ssm")


@dataclass(frozen=True)
class Found:
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
        if self.capped and config.listens:
            reason = reason or "queries of capped scores cannot be observed"
        if config.centred and (self.capped or self.sinks):
            reason = reason or (CAPPED if self.capped else SINKS)
        if self.latent:
            reason = reason or config.why_no_latents
        if reason:
            return LayerReport(index, self.kind, False, reason, kernel="sdpa", grows=self.grows)
        label, fitted = config.label, self.fitting(config)
        if self.latent:
            label, codes = of_latents(config), (fitted.keys.quantizer, fitted.values.quantizer)
            why_ops = choose.why_no_latents(*codes, self.sizes[1:], config.page, device)
        else:
            why_ops = choose.why_not(config, self.sizes[1:], device)
        if self.capped:
            why_ops = "capped scores have no kernel"
        kernel = f"torch ops ({why_ops})" if why_ops else choose.way(device).capitalize()
        return compressed(index, self.kind, fitted, label, self.sizes, kernel)


def examine(model: PreTrainedModel, config: CacheConfig) -> list[Found]:
    """Find what each cache of `model` is, by a dry run, and leave attention ours.

    A configuration that compresses nothing needs no run. Raises UserError for kv heads that the processes
    of a model cannot share.
    """
    _check_share(model)
    try:
        layers = plain_layers(model)
    except Exception as error:  # configurations that name no layers
        return [Found("unknown", True, f"transformers makes no cache for this model ({error})")]
    if not config.compresses:
        return [_of_class(layer) for layer in layers]
    growing = [i for i, layer in enumerate(layers) if replaceable(layer)]
    probes: dict[int, dryrun.Probe] = {}
    if growing and not _takes_caches(model):
        return [_of_class(layer, "the model takes no cache of transformers") for layer in layers]
    if growing:
        if model._can_set_attn_implementation():
            model.set_attn_implementation(name_for(model.config._attn_implementation))
        latent.bind(model)
        probes = dryrun.run(model, layers, growing)
    ranks = bool(text_config(model.config.to_dict()).get("kv_lora_rank"))
    return [
        _of_probe(probes[i], ranks, share_of(model).size > 1) if i in probes else _of_class(layer)
        for i, layer in enumerate(layers)
    ]


def _of_probe(probe: dryrun.Probe, ranks: bool, shared: bool) -> Found:
    """ranks: whether the model's configuration speaks of latents. shared: whether several processes have the model."""
    reason = probe.verdict
    if not probe.calls and not probe.refused:
        return Found("not used", False, "the model uses no cache of transformers")
    if probe.latents is not None:
        sizes = probe.sizes or (0, 0, 0)
        more = "more than softmax over latents" if probe.capped or probe.sinks else None
        if shared:
            more = "latents of a model in several processes: not supported"
        return Found(LATENT, True, reason or more, sizes, latent=True)
    if reason and ranks and probe.refused:
        return Found(LATENT, True, f"latent cache that grows: not supported ({reason})")
    return Found("full", True, reason, probe.sizes or (0, 0, 0), probe.capped, probe.sinks)


def _of_class(layer, reason: str | None = None) -> Found:
    """Return what the class of a layer's cache says. reason: why a plain one that grows is not replaced."""
    state = holds_state(layer)
    if isinstance(layer, DynamicSlidingWindowLayer):
        beside = " beside a state" if state else ""
        return Found(f"sliding window {layer.sliding_window}{beside}", False, "small by nature")
    if has_class(layer, "DynamicIndexedLayer"):
        return Found("indexed", True, "indexed cache that grows: not supported")
    if state and isinstance(layer, CacheLayerMixin):
        return Found(
            "full beside a state", True, "a cache that grows beside a state: not supported"
        )
    if state:
        return Found("state", False, "constant size")
    if replaceable(layer):
        return Found("full", True, reason)
    if has_class(layer, "DummyLayer"):
        return Found("no cache of its own", False, "nothing is stored")
    return Found(f"cache of class {type(layer).__name__}", True, "mlxkv does not know this class")


def _check_share(model: PreTrainedModel) -> None:
    """Raises UserError where the processes of a model cannot share its kv heads."""
    if (size := share_of(model).size) == 1:
        return
    for i, shape in enumerate(layers_of(model.config.to_dict())):
        if shape.kind == "full" and shape.kv_heads % size:
            raise UserError(
                f"[attach] {shape.kv_heads} kv heads of layer {i} cannot be shared by {size} "
                "processes; choose a tp_size that divides them"
            )


def _takes_caches(model: PreTrainedModel) -> bool:
    names = inspect.signature(model.forward).parameters
    return handing.NAME in names or any(p.kind is p.VAR_KEYWORD for p in names.values())


def implementations(model: PreTrainedModel) -> list[tuple[PreTrainedConfig, str | None]]:
    """The configurations of a model and of its parts, with the names of their attention functions."""
    left = [m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
    found: dict[int, PreTrainedConfig] = {}
    while left:
        config = left.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            left += [getattr(config, name, None) for name in config.sub_configs]
    return [(config, config._attn_implementation_internal) for config in found.values()]


def put_back(model: PreTrainedModel, before: list[tuple[PreTrainedConfig, str | None]]) -> None:
    """Undo what `examine` did to attention."""
    latent.release(model)
    for config, name in before:
        config._attn_implementation_internal = name


def _number(config: dict, *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), (int, float)):
            return int(config[name])
    raise UserError(f"[config.json] no {names[0]}; this is not the config of a language model")


def _caches_latents(config: dict) -> bool:
    """Return whether mlx-lm caches latents of a model. config: of `text_config`."""
    return bool(config.get("kv_lora_rank")) and config.get("model_type") in LATENTS


def _latents(config: dict, count: int, heads: int) -> list[LayerShape]:
    """The caches of a model with MLA: mlx-lm's own names for which of its layers have a state instead."""
    rank, rotary, plain = (
        int(config.get(name) or 0)
        for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
    )
    made = heads * (plain + int(config.get("v_head_dim") or 0))
    one, state = LayerShape("latent", 1, rank, rotary, expanded=made), LayerShape("state")
    if index := config.get("index_head_dim"):
        return [one, LayerShape("index", 1, int(index))] * count
    if str(config.get("model_type")).startswith("longcat"):
        return [one] * 2 * count
    linear = (config.get("linear_attn_config") or {}).get("kda_layers")
    if linear is not None:  # counted from 1
        return [state if i + 1 in linear else one for i in range(count)]
    if group := config.get("layer_group_size"):  # the last of each, and what is left over
        whole = count // int(group) * int(group)
        return [one if (i + 1) % int(group) == 0 or i >= whole else state for i in range(count)]
    return [one] * count


def _kinds(config: dict, layers: int) -> list[str]:
    """'full', 'sliding' or 'state' for each layer."""
    rotates = config.get("model_type") in ROTATING and config.get("sliding_window")
    pattern = config.get("sliding_window_pattern")
    types = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(pattern, str):  # exaone4 spells it out: "LLLG"
        types = ["full" if pattern[i % len(pattern)] == "G" else "sliding" for i in range(layers)]
    elif types is None and rotates and pattern:
        types = ["sliding" if (i + 1) % pattern else "full" for i in range(layers)]
    elif types is None and (interval := config.get("full_attention_interval")):
        types = ["linear_attention" if (i + 1) % interval else "full" for i in range(layers)]
    if types is None:
        return ["full"] * layers
    if len(types) != layers:
        raise UserError(f"[config.json] {layers} layers, but layer_types names {len(types)}")

    def kind(name: str) -> str:
        if any(state in name for state in STATES):
            return "state"
        return "sliding" if "sliding" in name and rotates else "full"

    return [kind(name) for name in types]


def layers_of(config: dict) -> list[LayerShape]:
    """The cache of each layer, from config.json alone. Raises UserError when it cannot tell."""
    config = text_config(config)
    count = _number(config, *DEPTH)
    heads = _number(config, *HEADS)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    dim = int(config.get("head_dim") or _number(config, *WIDTH) // heads)
    if _caches_latents(config):
        return _latents(config, count, heads)
    if config.get("kv_lora_rank") and config.get(
        "qk_nope_head_dim"
    ):  # cached as keys and values of heads
        dims = (int(config.get(f"qk_{name}_head_dim") or 0) for name in ("nope", "rope"))
        return [LayerShape("full", heads, sum(dims), int(config.get("v_head_dim") or dim))] * count
    kinds = _kinds(config, count)
    # Gemma 3n and 4: the last layers read the cache of earlier ones.
    kinds = kinds[: count - int(config.get("num_kv_shared_layers") or 0)]
    full_dim = int(config.get("global_head_dim") or dim)
    full_heads = int(config.get("num_global_key_value_heads") or kv_heads)
    tied = config.get("model_type") == "gpt_oss" or bool(config.get("attn_logit_softcapping"))
    shapes = {
        "full": LayerShape("full", full_heads, full_dim, full_dim, tied=tied),
        "sliding": LayerShape(
            "sliding", kv_heads, dim, dim, int(config.get("sliding_window") or 0)
        ),
        "state": LayerShape("state"),
    }
    return [shapes[kind] for kind in kinds]
