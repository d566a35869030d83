"""Layers with multi-head latent attention (MLA): found by structure, and how their attention is reached.

transformers caches the latent of each token and its rotary key, and makes keys and values of every head from all of
them at every step (`expand_kv`). A layer whose cache is ours is handed a view in place of latents; `expand_kv` passes
it on to attention together with its weights, so that a step of decoding can absorb them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedModel

from cuda_track.cache.latent import Heads, LatentView
from cuda_track.codec import packing
from cuda_track.codec.codec import both
from cuda_track.models.dryrun import Handle
from mlxkv.formats.config import ROTARY_BITS
from mlxkv.formats.records import NAMES

EXPAND = "expand_kv"  # the method of transformers' attention that makes keys and values
PARTS = ("kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")


def modules_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the attention modules of `model` that attend to latents."""
    return [m for m in model.modules() if all(hasattr(m, name) for name in (EXPAND, *PARTS))]


class Expanding:
    """Stands in for `expand_kv` of a module: hands views on, and notes what a dry run passes.

    An object, not a closure: copies and pickles of the model take one of their own with them.
    """

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def __call__(self, latents, rotary):
        if isinstance(latents, LatentView):
            view = replace(latents, heads=heads_of(self.module))
            return view, view
        expand = partial(getattr(type(self.module), EXPAND), self.module)
        if not isinstance(latents, Handle):
            return expand(latents, rotary)
        probe = latents.probe
        with torch._C.DisableTorchFunctionSubclass():
            pair = both(lambda x: x.as_subclass(torch.Tensor), (latents, rotary))
            probe.latents = LatentView(pair, heads=heads_of(self.module))
            return tuple(Handle.of(x, probe) for x in expand(*pair))


def heads_of(module: torch.nn.Module) -> Heads:
    """Return what the heads of `module` make of a latent. Raises ValueError where its weights cannot be absorbed."""
    projection, rank, *sizes = (getattr(module, name) for name in PARTS)
    if type(projection) is not torch.nn.Linear or projection.bias is not None:
        raise ValueError(f"weights of a {type(projection).__name__} cannot be absorbed")
    keys, values = projection.weight.view(-1, sum(sizes), rank).split(sizes, 1)
    expand = partial(getattr(type(module), EXPAND), module)
    return Heads(keys, values, expand)


def patch(model: PreTrainedModel) -> None:
    """Have the modules of `model` hand views on."""
    for module in modules_of(model):
        vars(module)[EXPAND] = Expanding(module)


def unpatch(model: PreTrainedModel) -> None:
    """Undo `patch`."""
    for module in model.modules():
        if isinstance(vars(module).get(EXPAND), Expanding):
            del vars(module)[EXPAND]


def interleaves(model: PreTrainedModel) -> bool:
    """Return whether weights have the two dims of a rotary pair side by side. mlx-lm leaves them so in what it caches;
    transformers has the first of all pairs, then the second."""
    return getattr(model.config.get_text_config(), "rope_interleave", True) is not False


def paired(state: dict, pairs: bool) -> dict:
    """Return a state whose rotary keys have their dims in the order of files, pairs side by side, or if not `pairs`
    in that of transformers."""

    def in_stored_order(x: torch.Tensor) -> torch.Tensor:
        halves = x.unflatten(-1, (2, -1) if pairs else (-1, 2))
        return halves.mT.flatten(-2).contiguous()

    out, values = dict(state), NAMES[1]
    for name in ("live", "sink", "last"):
        if name in out:
            out[name] = out[name] | {values: in_stored_order(out[name][values])}
    if "rotary" in out:
        out["rotary"] = in_stored_order(out["rotary"])
    if values in out.get("pages", {}):
        stored = out["pages"][values]
        dims = stored["codes"].shape[-1] * 32 // ROTARY_BITS
        codes = in_stored_order(packing.unpack(stored["codes"], ROTARY_BITS, dims))
        codes = packing.pack(codes, ROTARY_BITS)
        out["pages"] = out["pages"] | {values: stored | {"codes": codes}}
    return out
