"""Caches of transformers' contract: a layer over a compressed cache, and a `Cache` of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from cuda_track.cache.compressed import CompressedKVCache
from cuda_track.cache.view import Pair, View
from mlxkv.errors import UserError
from mlxkv.formats.records import NAMES

if TYPE_CHECKING:  # not every version has these
    from transformers.cache_utils import DummyLayer, LinearAttentionCacheLayerMixin

    CacheLayer = CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer


class CompressedLayer(CacheLayerMixin):
    """A layer over a compressed cache. `update` returns a view for `attend`, not tensors."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: CompressedKVCache):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[View, View]:
        self.is_initialized = True
        view = self.cache.update_and_fetch(key_states, value_states)
        return view, view

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (tokens, offset) of the mask for `query_length` new tokens; dropped ones have no column."""
        cache = self.cache
        dropped = cache.windows.dropped
        return cache.offset - dropped + query_length, dropped

    def get_seq_length(self) -> int:
        return self.cache.offset

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.cache.clear()
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last -tokens_to_remove tokens, as transformers counts them."""
        _check_crop(tokens_to_remove)
        self.cache.trim(-tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.cache.select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.cache.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cache.offset:
            batch = self.cache.view().recent[0].shape[0]
            self.cache.select(torch.arange(batch).repeat_interleave(repeats))

    def offload(self) -> None:
        """Nothing: a compressed layer stays where it is."""

    prefetch = offload


def _check_crop(tokens_to_remove: int) -> None:
    if tokens_to_remove > 0:
        raise UserError(
            f"[cache] crop takes away tokens, counted below 0; got {tokens_to_remove}; write "
            f"crop(-{tokens_to_remove}) to drop so many from the end"
        )


class CompressedCache(Cache):
    """A model's cache: compressed layers, and transformers' own for the rest (sliding windows)."""

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        if layer_idx >= len(self.layers):
            raise UserError(
                f"[cache] a cache of {len(self.layers)} layers; got keys of layer {layer_idx}; give each "
                "model a cache of its own, by new_cache(model)"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last -tokens_to_remove tokens of all layers. Raises UserError, and changes nothing, where
        a layer cannot take so many back."""
        _check_crop(tokens_to_remove)
        for layer in self.layers:
            if isinstance(layer, CompressedLayer):
                layer.cache.windows.trim(-tokens_to_remove)  # raises
        for layer in sorted(self.layers, key=lambda layer: isinstance(layer, CompressedLayer)):
            # Layers of transformers may refuse: first.
            layer.crop(tokens_to_remove)  # pyright: ignore[reportAttributeAccessIssue] (not of its base)

    def trim_to(self, length: int) -> bool:
        """Keep the first `length` tokens of all layers. False, and nothing has changed, where some layer cannot."""
        tokens = self.get_seq_length()
        if not 0 < length <= tokens or not all(
            _can_keep(layer, tokens, length) for layer in self.layers
        ):
            return False
        if length < tokens:
            for layer in self.layers:
                layer.crop(length - tokens)  # pyright: ignore[reportAttributeAccessIssue] (as above)
        return True

    def __iter__(self):
        """Yield keys, values and window of each layer in full precision, as `DynamicCache(cache)` takes them."""
        for layer in self.layers:
            if not isinstance(layer, CompressedLayer):
                keys, values = (getattr(layer, name) for name in NAMES)
                yield keys, values, getattr(layer, "_sliding_window_tensor", None)
            elif not layer.cache.offset:
                yield None, None, None
            else:
                cache, view = layer.cache, layer.cache.view()
                keys, values = view.whole(view.recent[0].dtype)
                maps = cache.layer_maps if cache.config.centred else None
                yield keys if maps is None else maps.add_mean(keys), values, None

    @property
    def nbytes(self) -> int:
        """Allocated bytes of all layers."""
        return sum(_bytes(layer) for layer in self.layers)


def _can_keep(layer, tokens: int, length: int) -> bool:
    """Return whether a layer can keep the first `length` of so many tokens."""
    if length == tokens:
        return True
    if isinstance(layer, CompressedLayer):
        return layer.cache.windows.can_keep(length)
    full = getattr(layer, "is_sliding", False) and tokens >= layer.sliding_window
    return not full and not holds_state(layer)


def _bytes(layer: CacheLayer) -> int:
    if isinstance(layer, CompressedLayer):
        return layer.cache.nbytes
    tensors = (x for x in (getattr(layer, name) for name in NAMES) if x is not None)
    return sum(x.numel() * x.element_size() for x in tensors)


def held(layer: CacheLayerMixin) -> Pair:
    """Return keys and values of a layer of transformers that has read tokens."""
    assert layer.keys is not None and layer.values is not None
    return layer.keys, layer.values


def plain_layers(model) -> list[CacheLayer]:
    """Return the empty caches that transformers makes for the layers."""
    return DynamicCache(config=model.config).layers


def replaceable(layer: CacheLayer) -> bool:
    """Return whether a compressed layer may take the place of this one."""
    return type(layer) is DynamicLayer


def has_class(layer, name: str) -> bool:
    """Return whether a layer is of a class of transformers, which not every version has."""
    return name in (kind.__name__ for kind in type(layer).__mro__)


def holds_state(layer) -> bool:
    """Return whether a layer keeps a state in place of tokens, or beside them."""
    return has_class(layer, "LinearAttentionCacheLayerMixin")
