"""`attach` and `detach`: run a model of transformers on compressed caches, unchanged.

An attention function is registered as "mlxkv". A compressed layer passes it a view, which `attend` reads;
other calls go to torch SDPA. `model.generate` makes a compressed cache unless it is given one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from cuda_track.cache import choose
from cuda_track.cache.adaptive import AdaptiveKVCache
from cuda_track.cache.attention import attend
from cuda_track.cache.compressed import CompressedKVCache
from cuda_track.cache.view import View
from cuda_track.codec import maps
from cuda_track.codec.maps import LayerMaps
from cuda_track.models.layers import CompressedCache, filled, plain_layers, replaceable
from cuda_track.models.parallel import insist_on_one, share_of
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact, layers
from mlxkv.formats.calibration.artifact import Calibration
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import parse_kv
from mlxkv.models.catalog import folder
from mlxkv.models.catalog.reports import ASKED_FOR, LayerReport, compressed, with_own
from mlxkv.models.catalog.shapes import LayerShape, layers_of

NAME = "mlxkv"
_ATTACHED = "_mlxkv_attached"


@dataclass
class Attached:
    """What `attach` did to a model.

    kv: as given. fits: configuration and maps of each compressed layer. before, generate: the model's
    own attention function and method.
    """

    kv: str | CacheConfig
    fits: dict[int, tuple[CacheConfig, LayerMaps | None]]
    layers: list[LayerReport]
    before: str
    calibration: Calibration | None = None
    generate: object = field(default=None, repr=False)


def attend_or_pass(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | View,
    value: torch.Tensor | View,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attend, by transformers' contract: query [B, H, L, D] -> ([B, L, H, D], None)."""
    if not isinstance(key, View):
        # Without a mask the queries are the newest tokens (`mask`); SDPA takes them for the oldest.
        later = attention_mask is None and 1 < query.shape[2] < key.shape[2]
        later = (
            later and kwargs.get("is_causal") is not False and getattr(module, "is_causal", True)
        )
        if s_aux is None and not later:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, **kwargs
            )
        key = View((key, value))
    for name in ("softcap", "position_bias"):
        if kwargs.get(name) is not None:
            raise UserError(
                f"[attach] this model's attention has a {name}; choose --kv fp16 for it"
            )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is None and query.shape[2] > 1:
        attention_mask = "causal"
    out = attend(query, key, scale, attention_mask, s_aux)
    return out.transpose(1, 2).contiguous(), None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor | None:
    """Make a mask, by transformers' contract: None for the newest tokens without padding.

    `attend` masks those itself, and SDPA runs flash attention only without a matrix.
    """
    # Static caches count in tensors: reading those would wait for the GPU.
    newest = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if mask_function is causal_mask_function and newest:
        seen = kv_offset + kv_length
        padded = attention_mask is not None and not attention_mask[:, :seen].all()
        if not padded:
            return None
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )


AttentionInterface.register(NAME, attend_or_pass)
AttentionMaskInterface.register(NAME, mask)


def attach(
    model: PreTrainedModel,
    kv: str | CacheConfig,
    calibration: Calibration | Path | str | None = None,
) -> list[LayerReport]:
    """Run `model` on the caches `kv`. Returns a report for each layer.

    calibration: for presets that need one; by default the one beside the model, else the user's own.
    Raises UserError.
    """
    detach(model)
    config, label = (parse_kv(kv), kv) if isinstance(kv, str) else (kv, "custom")
    if config.listens:  # heads vote together, and each process has some of them
        insist_on_one(model, "attach", f"{label} runs")
    shapes, plain = layers_of(model.config.to_dict()), plain_layers(model)
    if len(shapes) != len(plain):
        raise UserError(
            f"[attach] {len(plain)} caches for {len(shapes)} layers; choose --kv fp16 for this model"
        )
    reports = [
        _judge(i, shape, layer, config, label, model.device)
        for i, (shape, layer) in enumerate(zip(shapes, plain, strict=True))
    ]
    chosen = {r.index: shapes[r.index] for r in reports if r.compressed}
    fits, found = _fit(model, config, chosen, label, calibration)
    reports = [with_own(r, config, fits[r.index][0]) if r.compressed else r for r in reports]
    made = Attached(kv, fits, reports, model.config._attn_implementation, found)
    if chosen:
        made.generate = model.generate
        model.set_attn_implementation(NAME)
        model.generate = _with_cache(model, model.generate)
        model.init_continuous_batching = _no_batches
    setattr(model, _ATTACHED, made)
    return reports


def detach(model: PreTrainedModel) -> None:
    """Undo `attach`."""
    made: Attached | None = vars(model).pop(_ATTACHED, None)
    if made is not None and made.generate is not None:
        for name in ("generate", "init_continuous_batching"):
            vars(model).pop(name, None)
        model.set_attn_implementation(made.before)


def attached(model: PreTrainedModel) -> Attached:
    """Raises UserError where `attach` was not called."""
    if (made := vars(model).get(_ATTACHED)) is None:
        raise UserError("[attach] this model has no compressed cache; call attach(model, kv) first")
    return made


def new_cache(model: PreTrainedModel) -> CompressedCache:
    """An empty cache for `past_key_values`."""
    fits = attached(model).fits
    made = {
        i: (AdaptiveKVCache if config.listens else CompressedKVCache)(config, turns)
        for i, (config, turns) in fits.items()
    }
    return filled(model, made)


def _judge(
    index: int, shape: LayerShape, layer, config: CacheConfig, label: str, device: torch.device
) -> LayerReport:
    kind = f"sliding window {shape.window}" if shape.kind == "sliding" else shape.kind
    if not config.compresses:
        return LayerReport(index, kind, False, ASKED_FOR, kernel="sdpa")
    if shape.kind != "full" or not replaceable(layer):
        sliding = shape.kind == "sliding"
        reason = "small by nature" if sliding else "no plain cache that grows"
        return LayerReport(index, kind, False, reason, kernel="sdpa", grows=not sliding)
    why = choose.why_not(config, (shape.key_dim, shape.value_dim), device)
    kernel = f"torch ops ({why})" if why else choose.way(device).capitalize()
    sizes = (shape.kv_heads, shape.key_dim, shape.value_dim)
    return compressed(index, kind, config, label, sizes, kernel)


def _fit(
    model: PreTrainedModel,
    config: CacheConfig,
    chosen: dict[int, LayerShape],
    label: str,
    given: Calibration | Path | str | None,
) -> tuple[dict[int, tuple[CacheConfig, LayerMaps | None]], Calibration | None]:
    """The configuration and the maps of each layer, for the kv heads in this process."""
    share = share_of(model)
    for i, shape in chosen.items():
        if shape.kv_heads % share.size:
            raise UserError(
                f"[attach] {shape.kv_heads} kv heads of layer {i} cannot be shared by {share.size} "
                "processes; choose a tp_size that divides them"
            )
    if not config.calibrated or not chosen:
        return dict.fromkeys(chosen, (config, None)), None
    sizes = {str(i): (s.kv_heads, s.key_dim, s.value_dim) for i, s in chosen.items()}
    found, mark = _calibration(model, config, given)
    if found is None:
        raise UserError(
            f"[attach] {label} needs a calibration; got none; make one with python -m "
            "cuda_track.calibrate --model MODEL -o FILE, and name it by --calibration FILE"
        )
    found.check(sizes, mark)
    fits = {}
    for i in chosen:
        name, layer = str(i), found.layers[str(i)]
        own = layers.with_clips(layers.with_ranks(config, layer), layer)
        turns = maps.of(found, own.fitted, [name])[name]
        if share.size > 1:
            turns = maps.cut(turns, share.rank, share.size)
        fits[i] = own, turns.to(model.device)
    return fits, found


def _calibration(model, config: CacheConfig, given) -> tuple[Calibration | None, str | None]:
    """(calibration, the fingerprint that it must have, None if it is not known)."""
    path = Path(model.config._name_or_path)
    mark = getattr(model, "_mlxkv_fingerprint", None)
    if mark is None and path.is_dir():
        mark = folder.fingerprint(folder.check(path))
    if isinstance(given, Calibration):
        return given, mark
    if given is not None:
        return artifact.read(given), mark
    return (artifact.find(mark, path, config.balanced or config.low) if mark else None), mark


def _with_cache(model: PreTrainedModel, generate):
    """`model.generate` that makes a compressed cache if none is given."""

    @wraps(generate)
    def wrapped(*args, **kwargs):
        if kwargs.get("past_key_values") is None:
            kwargs["past_key_values"] = new_cache(model)
        return generate(*args, **kwargs)

    return wrapped


def _no_batches(*args, **kwargs):
    """Stands in for `model.init_continuous_batching`, which would bypass compressed caches."""
    raise UserError(
        "[attach] generate_batch of transformers makes a paged cache of its own; got a model with "
        "compressed caches; choose model.generate, or detach(model) first"
    )
