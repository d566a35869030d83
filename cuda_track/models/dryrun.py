"""Find what each cache of a model holds, and why some cannot be replaced, by a dry run over two and one tokens.

Probes hand out `Handle`s: the real keys and values, which note whether the model's code does anything
with them but pass them to attention. Attention is computed twice, by the model's own function and by
ours, and the model goes on with its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from cuda_track.cache.attention import causal
from cuda_track.cache.compressed import CompressedKVCache
from cuda_track.cache.latent import LatentView
from cuda_track.models.layers import CompressedCache, CompressedLayer
from cuda_track.models.transformers_compat import handed
from mlxkv.formats.names import parse_kv

if TYPE_CHECKING:
    from cuda_track.models.layers import CacheLayer

CALLS = (2, 1)  # tokens of the dry calls: a prompt, then a step of decoding
SMALL = 1 << 20  # bytes of a buffer that is put back; larger ones are weights in few bits
NEAR = 5e-3  # of the norm of an attention's output
PEAK = 8.0  # the largest score that outputs are compared at: what bends scores shows there
WIDEST = parse_kv("int4")  # of probes, which never quantize


class Probe(CompressedLayer):
    """A layer that holds the few tokens of a dry run.

    sizes: kv heads, key dim, value dim, once something was stored. capped: whether scores are
    (softcap). sinks: whether a logit stands beside them. latents: a view of latents and rotary keys, where keys and
    values are made of these (MLA). refused: why a compressed layer cannot stand here.
    """

    def __init__(self):
        super().__init__(CompressedKVCache(WIDEST))
        self.sizes: tuple[int, int, int] | None = None
        self.calls: list[int] = []
        self.waiting = self.capped = self.sinks = False
        self.latents: LatentView | None = None
        self.refused: str | None = None

    def update(self, key_states, value_states, *args, **kwargs):
        view, _ = super().update(key_states, value_states, *args, **kwargs)
        keys, values = view.whole(key_states.dtype)
        self.sizes = keys.shape[1], keys.shape[3], values.shape[3]
        self.calls.append(key_states.shape[2])
        self.waiting = True
        return Handle.of(keys, self), Handle.of(values, self)

    def refuse(self, reason: str) -> None:
        """Note why; the first reason counts."""
        self.refused = self.refused or reason

    @property
    def verdict(self) -> str | None:
        """Return why a compressed layer cannot stand here, or None, after the run."""
        if self.refused:
            return self.refused
        if self.waiting:
            return "the model computes attention in its own way"
        if tuple(self.calls) != CALLS:
            return f"a dry run over {CALLS} tokens stored {tuple(self.calls)}"
        return None


class Handle(torch.Tensor):
    """The keys or the values of a probe. Any use of them is done, and noted."""

    probe: Probe

    @classmethod
    def of(cls, x: torch.Tensor, probe: Probe) -> Handle:
        out = x.as_subclass(cls)
        out.probe = probe
        return out

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        everything, _ = tree_flatten((args, kwargs))
        name = torch.overrides.resolve_name(func) or getattr(func, "__name__", str(func))
        name = name.removesuffix(".__get__").rpartition(".")[2]
        for handle in everything:
            if isinstance(handle, cls):
                handle.probe.refuse(f"the model uses cached keys or values as arrays ({name})")
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = _plain((args, kwargs or {}))
            return func(*args, **kwargs)


def _plain(tree):
    with torch._C.DisableTorchFunctionSubclass():
        return tree_map_only(Handle, lambda x: x.as_subclass(torch.Tensor), tree)


def probed(
    query: torch.Tensor,
    key: Handle,
    value,
    mask,
    expected: Callable,
    computed: Callable,
    capped: bool,
    sinks: bool = False,
) -> torch.Tensor:
    """Attend as `expected` does, and note whether `computed` agrees. Both take (queries, keys, values, mask)."""
    probe = key.probe
    keys, values = _plain((key, value))
    if not isinstance(value, Handle) or value.probe is not probe:
        probe.refuse("the model attends with keys and values of different caches")
        return expected(query, keys, values, mask)
    probe.waiting, probe.capped, probe.sinks = False, capped, sinks
    try:
        gap = _gap(query, keys, values, mask, expected, computed)
        if not gap < NEAR:
            probe.refuse(f"the model's attention is another function ({gap:.1%} apart)")
    except Exception as error:  # a foreign model may raise anything at all
        probe.refuse(_line(error))
    return expected(query, keys, values, mask)


def _gap(query, keys, values, mask, expected: Callable, computed: Callable) -> float:
    """Return how far apart two attentions are, relative, at scores up to PEAK."""
    # In float64, which Apple's GPUs lack: float32 may be TF32 on NVIDIA's.
    kind = torch.float32 if query.device.type == "mps" else torch.float64
    q, k, v = (x.to(kind) for x in (query, keys, values))
    heads = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    peak = (q @ heads.mT).abs().max() * q.shape[-1] ** -0.5
    q = q * (PEAK / peak.clamp(min=1e-6))
    right, actual = expected(q, k, v, mask).float(), computed(q, k, v, mask).float()
    return float((right - actual).norm() / right.norm().clamp(min=1e-9))


def matrix(
    mask: torch.Tensor | str | None, new: int, total: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Convert a mask of `attend` to what transformers' eager attention adds to its scores, [.., L, T] or None."""
    if isinstance(mask, str):
        mask = causal(new, total, device)[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


def run(model, layers: list[CacheLayer], places: list[int]) -> dict[int, Probe]:
    """Run `model` over a few tokens on `layers`, with probes at `places`; return them by place.

    Attention must be ours. The model is left as it was; what goes wrong becomes a reason, never an error.
    """
    probes = {i: Probe() for i in places}
    cache = CompressedCache(layers=[probes.get(i, layer) for i, layer in enumerate(layers)])
    try:
        with _unchanged(model), torch.no_grad():
            # Of equal tokens the values are equal, and every attention's output.
            ids = torch.arange(1, 1 + sum(CALLS), device=model.device)[None]
            for part in ids.split(CALLS, 1):
                model(part, **handed(cache), use_cache=True)
    except Exception as error:  # a foreign model may raise anything at all
        for probe in probes.values():
            probe.refuse(_line(error))
    return probes


def _line(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0][:80]
    return f"a dry run of the model failed ({type(error).__name__}: {text})"


@contextmanager
def _unchanged(model) -> Iterator[None]:
    """Put back what a forward pass may change: modes, attributes, buffers, random numbers."""
    modules = list(model.modules())
    saved = [(dict(vars(m)), dict(m._buffers)) for m in modules]
    copies = [(x, x.clone()) for x in model.buffers() if x.numel() * x.element_size() <= SMALL]
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            for module in modules:
                module.training = False
            yield
        finally:
            for module, (attributes, buffers) in zip(modules, saved, strict=True):
                vars(module).clear()
                vars(module).update(attributes)
                module._buffers.clear()
                module._buffers.update(buffers)
            with torch.no_grad():
                for x, copy in copies:
                    if not torch.equal(x, copy):
                        x.copy_(copy)
