"""The attention that is registered with transformers, and its masks.

A compressed layer passes a view in place of keys, which `attend` reads. Other calls go to torch SDPA, or to
the model's own eager function: for models that were loaded with it ("mlxkv-eager"), or that cap their scores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from cuda_track.cache import latent
from cuda_track.cache.attention import Mask, attend, weights
from cuda_track.cache.latent import LatentView
from cuda_track.cache.view import View
from cuda_track.models.dryrun import Handle, matrix, probed

NAME, EAGER = "mlxkv", "mlxkv-eager"
CAUSAL = "is_causal_alone"  # an attribute of masks that say nothing else


def name_for(implementation: str | None) -> str:
    """Return the implementation that replaces `implementation`."""
    return EAGER if implementation == "eager" else NAME


def attend_or_pass(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | View,
    value: torch.Tensor | View,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    eager: bool = False,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend, by transformers' contract: query [B, H, L, D] -> ([B, L, H, D], weights [B, H, L, T] or None).

    eager: without a view, do as the model's eager attention does. With one, weights are there if asked for.
    """
    sinks, softcap = kwargs.get("s_aux"), kwargs.get("softcap")
    bias = kwargs.get("position_bias")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    new = query.shape[2]
    causal = new > 1 and _is_causal(module, kwargs)
    mask: Mask = "causal" if attention_mask is None and causal else attention_mask
    if getattr(attention_mask, CAUSAL, False):
        mask = "causal" if new > 1 else None
    expected = partial(_expected, module, scale, kwargs)
    if isinstance(key, Handle):

        def computed(q, k, v, mask):
            if (latents := key.probe.latents) is not None:
                return latent.attend(q, latents.to(q.dtype), scale, _biased(mask, bias, q, k))
            return attend(q, View((k, v)), scale, _biased(mask, bias, q, k), sinks, softcap)

        out = probed(
            query, key, value, mask, expected, computed, softcap is not None, sinks is not None
        )
        return out.transpose(1, 2).contiguous(), None
    if isinstance(key, View):
        view = key
    else:
        assert not isinstance(value, View)  # a layer hands on two views, or none
        own = _eager(module) if eager or softcap is not None else None
        if own is not None:
            return _eager_of(own, module, query, key, value, mask, scale, kwargs)
        # Without a mask the queries are the newest tokens (`mask`); SDPA takes them for the oldest.
        if sinks is None and (mask is attention_mask or new == key.shape[2]):
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, **kwargs
            )
        view = View((key, value))
    mask = _biased(mask, bias, query, view.recent[0], view.tokens)
    if isinstance(view, LatentView):
        out, p = latent.attend(query, view, scale, mask), None
        if _weights_asked(module, kwargs):
            p = weights(query, latent.expanded(view, query.dtype), scale, mask)
        return out.transpose(1, 2).contiguous(), p
    out = attend(query, view, scale, mask, sinks, softcap)
    wanted_weights = _weights_asked(module, kwargs)
    p = weights(query, view, scale, mask, sinks, softcap) if wanted_weights else None
    return out.transpose(1, 2).contiguous(), p


def _is_causal(module: torch.nn.Module, kwargs: dict) -> bool:
    """Return whether attention is causal, as torch SDPA in transformers finds out."""
    is_causal = kwargs.get("is_causal")
    return getattr(module, "is_causal", True) if is_causal is None else is_causal


def _weights_asked(module: torch.nn.Module, kwargs: dict) -> bool:
    config = getattr(module, "config", None)
    return kwargs.get("output_attentions") or getattr(config, "output_attentions", False)


def _biased(mask: Mask, bias: torch.Tensor | None, query, keys, total: int | None = None) -> Mask:
    """Return the mask with a bias of positions, [1, H, L, T], added to it."""
    if bias is None:
        return mask
    new, total = query.shape[2], total or keys.shape[2]
    added = matrix(mask, new, total, query.dtype, query.device)
    return bias if added is None else bias + added


def _eager(module: torch.nn.Module) -> Callable | None:
    """Return the eager attention in the file of a model's attention."""
    return getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)


def _eager_of(own: Callable, module, query, key, value, mask: Mask, scale: float, kwargs: dict):
    total = key.shape[2]
    added = matrix(mask, query.shape[2], total, query.dtype, query.device)
    if added is None:  # some eager functions add one always
        added = query.new_zeros(1, 1, query.shape[2], total)
    return own(module, query, key, value, added, scaling=scale, **kwargs)


def _expected(module, scale: float, kwargs: dict, query, key, value, mask: Mask) -> torch.Tensor:
    """Return the model's own attention, [B, H, L, D]: its eager function, or SDPA where it has none."""
    if (own := _eager(module)) is None:
        added = matrix(mask, query.shape[2], key.shape[2], query.dtype, query.device)
        out, _ = sdpa_attention_forward(module, query, key, value, added, scaling=scale, **kwargs)
    else:
        out, _ = _eager_of(own, module, query, key, value, mask, scale, kwargs)
    return out.transpose(1, 2)


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
        tokens = kv_offset + kv_length
        padded = attention_mask is not None and not attention_mask[:, :tokens].all()
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


def eager_mask(batch_size: int, q_length: int, kv_length: int, **kwargs) -> torch.Tensor:
    """Make a matrix always: for models of eager attention, where no mask means that all is seen."""
    plain = mask(batch_size, q_length, kv_length, **kwargs) is None
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    out = sdpa_mask(batch_size, q_length, kv_length, **kwargs)
    assert out is not None  # nothing may be skipped
    if plain and kwargs.get("mask_function", causal_mask_function) is causal_mask_function:
        setattr(out, CAUSAL, True)
    return out


AttentionInterface.register(NAME, attend_or_pass)
AttentionMaskInterface.register(NAME, mask)
AttentionInterface.register(EAGER, partial(attend_or_pass, eager=True))
AttentionMaskInterface.register(EAGER, eager_mask)
