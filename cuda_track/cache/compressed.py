"""`CompressedKVCache`: a `WindowedCache` of one layer on torch, and its state as mlxkv saves it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._pytree import tree_map

from cuda_track.cache.choose import store
from cuda_track.cache.runs import Segments, Store
from cuda_track.cache.view import Pair, Parts, View
from cuda_track.codec.codec import QuantizedPages, both
from cuda_track.codec.maps import LayerMaps
from cuda_track.codec.transform import Transform
from mlxkv.errors import UserError
from mlxkv.formats import state
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.rules.windowed import WindowedCache

FindMaps = Callable[[str, str, CacheConfig], LayerMaps]  # by digest and layer


def _zeros_like(x: torch.Tensor, tokens: int) -> torch.Tensor:
    return x.new_zeros(*x.shape[:2], tokens, x.shape[3])


def _concatenated(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.cat([first, second], 2)


class CompressedKVCache(WindowedCache):
    """The KV cache of one layer, compressed as `config` says. Keys and values: [B, G, L, D].

    layer_maps: of this layer, for a calibrated `config`.
    """

    store: Store | Segments | None
    _zeros, _joined = staticmethod(_zeros_like), staticmethod(_concatenated)
    _copied = staticmethod(torch.clone)

    def __init__(self, config: CacheConfig, layer_maps: LayerMaps | None = None):
        state.check_calibrated(config, layer_maps)
        self.config = config
        self.layer_maps = layer_maps if config.calibrated else None
        self.store = None
        self._forget()

    def clear(self) -> None:
        """Forget all tokens; pages that others hold too stay where they are."""
        self._forget()

    def _forget(self) -> None:
        if self.store is not None:
            self.store.truncate(0)
        super()._forget()

    # -- reading and writing

    def update_and_fetch(self, keys: torch.Tensor, values: torch.Tensor) -> View:
        """Append keys and values [B, G, L, D]; return what attention has to read.

        The view holds the new tokens exactly, also when this very call quantizes them.
        """
        self._check_batch(keys)
        if self.config.centred:
            self._check_heads(keys.shape[1])
            keys = self._maps.subtract_mean(keys)
        self.offset += keys.shape[2]
        if self._count + keys.shape[2] <= self._recent_capacity:
            self._append(keys, values)
            return self.view()
        recent = self._with_recent((keys, values))
        view = self._view(recent)
        self._quantize_pages(recent)
        return view

    @property
    def _maps(self) -> LayerMaps:
        """The maps of a calibrated configuration."""
        if self.layer_maps is None:
            raise ValueError("a cache without maps")
        return self.layer_maps

    def _check_batch(self, keys: torch.Tensor) -> None:
        if self._recent is not None:
            state.check_batch(self._recent[0].shape[0], keys.shape[0])

    def view(self) -> View:
        """Return what attention reads, without appending anything."""
        return self._view(self._read_recent())

    def _view(self, recent: Pair) -> View:
        return View(recent, self.sink, self._pages())

    def _pages(self) -> QuantizedPages | Parts | None:
        store = self.store
        return store.read(0, store.count) if store is not None and store.count else None

    def _quantize_pages(self, recent: Pair) -> None:
        if self.store is None:
            self._check_heads(recent[0].shape[1])
        super()._quantize_pages(recent)

    def _check_heads(self, heads: int) -> None:
        transforms = (self.layer_maps.keys, self.layer_maps.values) if self.layer_maps else ()
        head_counts = {len(transform.down) for transform in transforms if transform.down.ndim == 3}
        if self.layer_maps and self.layer_maps.mean is not None:
            head_counts.add(len(self.layer_maps.mean))
        if head_counts - {heads}:
            raise UserError(
                f"[CompressedKVCache] transforms of {max(head_counts)} kv heads; got keys of {heads}; choose "
                "a calibration of this model, shared as its heads are"
            )

    def _new_store(self, recent: Pair) -> Store | Segments:
        dims = both(lambda x: x.shape[3], recent)
        return store(self.config, dims, recent[0].device, self.layer_maps)

    def _decoded(self, page: int, count: int) -> Pair:
        assert self.store is not None and self._recent is not None
        pages, recent = self.store.read(page, page + 1), self._recent
        return both(lambda side: pages.decode(side, recent[side].dtype)[:, :, :count], (0, 1))

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order: beams, finished sequences, repeats."""
        if self._recent is None:
            return
        self._recent, self.sink, self.last = (
            pair and both(lambda x: x[rows], pair) for pair in (self._recent, self.sink, self.last)
        )
        if self.store is not None:
            self.store.select(rows)

    @property
    def nbytes(self) -> int:
        """Allocated bytes: pages with their spare capacity, sink and recent windows."""
        return sum(x.numel() * x.element_size() for x in self._arrays())

    def _arrays(self) -> list[torch.Tensor]:
        pairs = (self._recent, self.sink, self.last)
        windows = [x for pair in pairs if pair is not None for x in pair]
        return [*windows, *(self.store.arrays() if self.store else ())]

    # -- what mlxkv saves

    @property
    def state(self) -> dict:
        """All that has to be saved, as a tree of tensors; the header is in bytes (`mlxkv.formats.state`)."""
        named = self.layer_maps and (self.layer_maps.digest, self.layer_maps.layer)
        extra, extra_tree = self._extra()
        data = state.header(self.config, self.offset, self._count_pages, named, **extra)
        return state.tree(
            torch.frombuffer(bytearray(data), dtype=torch.uint8),
            recent=None if self._recent is None else self._read_recent(),
            sink=self.sink,
            last=self.last,
            pages=self.store.state if self.store is not None and self.store.count else None,
            more=extra_tree,
        )

    @classmethod
    def from_state(
        cls, tree: dict, find: FindMaps | None = None, device: torch.device | None = None
    ) -> CompressedKVCache:
        """Return the cache that a state of either track was taken from.

        find: returns the maps of (digest, layer, configuration). Raises UserError.
        """
        try:
            data = bytes(tree["header"].cpu().tolist())
        except (KeyError, TypeError, ValueError, AttributeError):
            raise state.unreadable() from None
        header, config = state.read_header(data)
        maps = None
        if config.calibrated and find is not None:
            maps = find(*state.calibration_of(header), config)
            maps = maps.to(device or maps.keys.down.device)
        out = cls(config, maps)
        try:
            out._restore(header, tree_map(lambda x: x.to(device), tree))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise state.cut(error) from None
        return out

    def _restore(self, header: dict, tree: dict) -> None:
        self._restore_extra(header, tree)
        transform = self._maps.values if header.get("folded") else None
        self._recent, self.sink, self.last = (
            self._window_of(state.window(tree, name), transform)
            for name in ("live", "sink", "last")
        )
        self._count = 0 if self._recent is None else self._recent[0].shape[2]
        if header["pages"]:
            if self._recent is None:
                raise ValueError("pages without a recent window")
            self.store = self._new_store(self._recent)
            self.store.restore(tree["pages"], header["pages"])
        self.offset = header["offset"]
        if self._recent is not None and self.offset != self.windows.offset:
            raise ValueError(f"{self.offset} tokens announced")

    @staticmethod
    def _window_of(pair: Pair | None, transform: Transform | None) -> Pair | None:
        """Return copies of a window; transform: of values that were saved behind weights which transform them."""
        if pair is None:
            return None
        keys, values = pair
        if transform is not None:
            values = transform.to(values.device).restore(values).to(values.dtype)
        return keys.clone(), values.clone()
