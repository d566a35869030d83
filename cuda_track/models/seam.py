"""`attach` and `detach`: a model of transformers runs on compressed caches, unchanged.

An attention function is registered under the name "mlxkv". A layer whose cache is ours hands it a
view and gets `attend`; every other call goes where it went. `model.generate` starts with a cache of
ours unless it is given one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from cuda_track import calibrated, stores
from cuda_track.adaptive import AdaptiveKVCache
from cuda_track.attention import attend
from cuda_track.cache import CompressedKVCache, View
from cuda_track.calibrated import Rotations
from cuda_track.models.layers import CompressedCache, filled, plain_layers, replaceable
from cuda_track.models.parallel import insist_on_one, share_of
from mlxkv import artifact
from mlxkv.artifact import Calibration
from mlxkv.config import CacheConfig, parse_kv
from mlxkv.errors import UserError
from mlxkv.models import folder
from mlxkv.shapes import LayerShape, layers_of

NAME = "mlxkv"
_ATTACHED = "_mlxkv_attached"


@dataclass(frozen=True)
class LayerReport:
    """What happens to the cache of one layer. reason: the preset if compressed, else why not. kernel:
    what computes attention when codes are read. bases: bytes of those that follow the text, for each
    of a batch."""

    index: int
    kind: str
    compressed: bool
    reason: str
    bits_per_value: float = 16.0
    kernel: str = "sdpa"
    bases: int = 0


@dataclass
class Attached:
    """What `attach` did. kv: as it was asked for. fits: configuration and transforms of each
    compressed layer. before, generate: of the model as it came."""

    kv: str | CacheConfig
    fits: dict[int, tuple[CacheConfig, Rotations | None]]
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
    """The attention function of transformers' contract: query [B, H, L, D] -> ([B, L, H, D], None)."""
    if not isinstance(key, View):
        # No mask: the newest of these tokens are causal (`mask`). SDPA would count from the oldest.
        later = attention_mask is None and 1 < query.shape[2] < key.shape[2]
        later = (
            later and kwargs.get("is_causal") is not False and getattr(module, "is_causal", True)
        )
        if s_aux is None and not later:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, **kwargs
            )
        key = View((key, value))  # which knows both, and attention sinks
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
    """The mask function of transformers' contract: none for the newest of all tokens without padding,
    which `attend` knows how to mask. A matrix of them would keep SDPA from flash attention."""
    # Static caches count in tensors, which nobody should wait for.
    newest = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if mask_function is causal_mask_function and newest:
        seen = kv_offset + kv_length  # tokens that were dropped count
        padded = attention_mask is not None and not attention_mask[:, :seen].all()
        if not padded:
            return None
    return sdpa_mask(
        *(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask),
        **kwargs,
    )


AttentionInterface.register(NAME, attend_or_pass)
AttentionMaskInterface.register(NAME, mask)


def attach(
    model: PreTrainedModel,
    kv: str | CacheConfig,
    calibration: Calibration | Path | str | None = None,
) -> list[LayerReport]:
    """Let `model` run on caches that `kv` names. Returns a report per layer.

    calibration: for presets that need one; by default the one beside the model, or the user's own.
    Raises UserError.
    """
    detach(model)
    config, label = (parse_kv(kv), kv) if isinstance(kv, str) else (kv, "custom")
    if config.listens:  # what heads vote for together is not known to one of the processes
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
    reports = [_with_rank(r, shapes[r.index], fits) for r in reports]
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


def summarise(reports: list[LayerReport]) -> list[str]:
    """One line per kind of layer."""
    groups: dict[tuple, list[str]] = {}
    for r in reports:
        what = f"full precision, {r.reason}"
        if r.compressed:
            what = f"{r.reason}, {r.bits_per_value:.3g} bits per value, {r.kernel}"
            what += f", on top bases of {r.bases / 1024:.0f} KB per cache" if r.bases else ""
        groups.setdefault((r.kind, what), []).append(str(r.index))
    return [f"layers {', '.join(at)} ({kind}): {what}" for (kind, what), at in groups.items()]


def _judge(
    index: int, shape: LayerShape, layer, config: CacheConfig, label: str, device: torch.device
) -> LayerReport:
    kind = f"sliding window {shape.window}" if shape.kind == "sliding" else shape.kind
    if not config.compresses:
        return LayerReport(index, kind, False, "as asked for")
    if shape.kind != "full" or not replaceable(layer):
        reason = "small by nature" if shape.kind == "sliding" else "no plain cache that grows"
        return LayerReport(index, kind, False, reason)
    if reason := config.why_not(shape.key_dim, shape.value_dim):
        return LayerReport(index, kind, False, reason)
    bits = config.bits_per_value(shape.key_dim, shape.value_dim)
    why = stores.why_not(config, (shape.key_dim, shape.value_dim), device)
    kernel = f"torch ops ({why})" if why else stores.way(device).capitalize()
    return LayerReport(index, kind, True, label + config.keys.note(shape.key_dim), bits, kernel)


def _fit(
    model: PreTrainedModel,
    config: CacheConfig,
    chosen: dict[int, LayerShape],
    label: str,
    given: Calibration | Path | str | None,
) -> tuple[dict[int, tuple[CacheConfig, Rotations | None]], Calibration | None]:
    """Searched clips and transforms for each of the layers, of the kv heads in this process."""
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
    for i, shape in chosen.items():
        name, layer = str(i), found.layers[str(i)]
        own = calibrated.with_ranks(config, layer)
        turns = calibrated.of(found, own.fitted, [name])[name]
        turns = turns.of_share(share.rank, share.size).to(model.device)
        fits[i] = calibrated.clipped(own, layer, (shape.key_dim, shape.value_dim)), turns
    return fits, found


def _with_rank(report: LayerReport, shape: LayerShape, fits: dict) -> LayerReport:
    """The bits that the rank takes which the energy of this layer has asked for, and its bases."""
    if not report.compressed:
        return report
    config, dims = fits[report.index][0], (shape.key_dim, shape.value_dim)
    bits, bases = config.bits_per_value(*dims), config.basis_bytes(shape.kv_heads, *dims)
    return replace(report, bits_per_value=bits, bases=bases)


def _calibration(model, config: CacheConfig, given) -> tuple[Calibration | None, str | None]:
    """The calibration, and the fingerprint that it has to have (None: not known)."""
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
    """`model.generate` that starts with a cache of ours where none is given."""

    @wraps(generate)
    def wrapped(*args, **kwargs):
        if kwargs.get("past_key_values") is None:
            kwargs["past_key_values"] = new_cache(model)
        return generate(*args, **kwargs)

    return wrapped


def _no_batches(*args, **kwargs):
    """Instead of `model.init_continuous_batching`, which would leave compressed caches aside."""
    raise UserError(
        "[attach] generate_batch of transformers makes a paged cache of its own; got a model with "
        "compressed caches; choose model.generate, or detach(model) first"
    )
