"""Observe the calls of attention, for calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cuda_track.models.attach_model import attach, attached, detach
from mlxkv.errors import UserError

NAME = "mlxkv-observing"


@dataclass(frozen=True)
class Call:
    """One call of attention. queries, out: [B, H, L, D]. keys, values: [B, G, L, D]. scale: of scores. output: weights
    of the output projection, [H, D, hidden], or None if they are not known."""

    layer: int
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor
    scale: float
    output: torch.Tensor | None


Observer = Callable[[Call], torch.Tensor | None]  # what it returns is added to `out`
_observers: list[Observer] = []


def _observed(module, query, key, value, attention_mask, **kwargs):
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise UserError(
            "[calibrate] this model's attention is more than softmax; got softcap or sinks"
        )
    rounded = query.to(value.dtype), key.to(value.dtype)  # `exact_ropes` has them in float32
    out, weights = sdpa_attention_forward(module, *rounded, value, attention_mask, **kwargs)
    if _observers:
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        mixed = out.swapaxes(1, 2)
        call = Call(module.layer_idx, query, key, value, mixed, scale, _output(module, query))
        if (shift := _observers[-1](call)) is not None:
            out = out + shift.swapaxes(1, 2).to(out.dtype)
    return out, weights


AttentionInterface.register(NAME, _observed)
AttentionMaskInterface.register(NAME, sdpa_mask)


def _output(module: torch.nn.Module, query: torch.Tensor) -> torch.Tensor | None:
    projection = getattr(module, "o_proj", None)
    if not isinstance(projection, torch.nn.Linear):
        return None
    heads = query.shape[1]
    return projection.weight.T.reshape(heads, -1, projection.weight.shape[0])


@contextmanager
def exact_ropes(model: PreTrainedModel) -> Iterator[None]:
    """Give calls that are observed queries and keys in float32: rounded to 16 bits, they hide how far slow pairs
    rotate."""

    def whole(_, given: tuple) -> tuple:
        return (given[0].float(), *given[1:])  # sines and cosines get its dtype

    ropes = [x for x in model.modules() if type(x).__name__.endswith("RotaryEmbedding")]
    hooks = [rope.register_forward_pre_hook(whole) for rope in ropes]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def observing(model: PreTrainedModel, observer: Observer) -> Iterator[None]:
    """Call `observer` for every call of attention inside, and add what it returns to the output; attach the compressed
    cache again at the end."""
    attachment = attached(model)
    detach(model)
    implementation = cast(str, model.config._attn_implementation)  # models that are built have one
    model.set_attn_implementation(NAME)
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.pop()
        model.set_attn_implementation(implementation)
        attach(model, attachment.kv, attachment.calibration)
