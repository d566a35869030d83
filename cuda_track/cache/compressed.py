"""`CompressedKVCache`: sink | pages | recent of one layer, and its state as mlxkv saves it.

    tokens:  [ sink: full precision ][ page ] ... [ page ][ recent: full precision ]

`recent` holds everything until it is full; then the sink moves out and the oldest pages are encoded
and quantized. The page that was quantized last keeps its exact tokens beside its codes, until the next one
is quantized: so that a `trim` into it can restore it (`mlxkv.formats.rules.windows`).
"""

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
from mlxkv.formats.rules.windows import TrimPlan, TrimSource, Windows, between
from mlxkv.formats.sizes import buffer_tokens

FindMaps = Callable[[str, str, CacheConfig], LayerMaps]  # by digest and layer


class CompressedKVCache:
    """The KV cache of one layer, compressed as `config` says. Keys and values: [B, G, L, D].

    layer_maps: of this layer, for a calibrated `config`.
    """

    def __init__(self, config: CacheConfig, layer_maps: LayerMaps | None = None):
        state.check_calibrated(config, layer_maps)
        self.config = config
        self.layer_maps = layer_maps if config.calibrated else None
        self._store: Store | Segments | None = None
        self._forget()

    def clear(self) -> None:
        """Forget all tokens; pages that others hold too stay where they are."""
        self._forget()

    def _forget(self) -> None:
        if self._store is not None:
            self._store.truncate(0)
        self.offset = 0
        self._recent: Pair | None = None  # buffers; `_count` tokens are in use
        self._count = 0
        self._sink: Pair | None = None
        self._last: Pair | None = None  # exact tokens of the page quantized last
        self._store = None

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
        return View(recent, self._sink, self._pages())

    def _pages(self) -> QuantizedPages | Parts | None:
        store = self._store
        return store.read(0, store.count) if store is not None and store.count else None

    def _read_recent(self) -> Pair:
        assert self._recent is not None
        return both(lambda x: x[:, :, : self._count], self._recent)

    def _with_recent(self, new: Pair) -> Pair:
        """Return the recent tokens and new ones."""
        if not self._count:
            return new
        return _joined(self._read_recent(), new)

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        new, end = (keys, values), self._count + keys.shape[2]
        if self._recent is None or end > self._recent[0].shape[2]:
            capacity = max(min(self._recent_capacity, buffer_tokens(self._count, end)), end)
            buffers = both(lambda x: x.new_zeros(*x.shape[:2], capacity, x.shape[3]), new)
            if self._count:
                for buffer, old in zip(buffers, self._read_recent(), strict=True):
                    buffer[:, :, : self._count] = old
            self._recent = buffers
        for buffer, x in zip(self._recent, new, strict=True):
            buffer[:, :, self._count : end] = x
        self._count = end

    def _quantize_pages(self, recent: Pair) -> None:
        """Encode the oldest pages of `recent`, which no longer fits, and keep the rest."""
        due, page = self.windows.flush(recent[0].shape[2]), self.config.page
        if due.sink:
            self._sink = both(torch.clone, between(recent, None, due.sink))
        if self._store is None:
            self._check_heads(recent[0].shape[1])
            self._store = self._new_store(recent)
        self._store.append(recent, due.pages, due.sink)
        self._recent, self._count = None, 0
        self._last = both(torch.clone, between(recent, due.stop - page, due.stop))
        self._append(*between(recent, due.stop, None))

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

    @property
    def windows(self) -> Windows:
        """Where its tokens are."""
        return Windows(
            self.config, self._sunk, self._count_pages, self._count, self._last is not None
        )

    @property
    def _count_pages(self) -> int:
        return self._store.count if self._store else 0

    @property
    def _recent_capacity(self) -> int:
        return self.config.recent_capacity(self._sink is not None)

    @property
    def _sunk(self) -> int:
        """Tokens of the sink that have left the recent window."""
        return self._sink[0].shape[2] if self._sink else 0

    def trim(self, n: int) -> int:
        """Drop the last n tokens, return how many were dropped. Raises UserError, and changes nothing, where
        what is left cannot be kept alone."""
        plan = self.windows.trim(n)
        self._trim(plan)
        return plan.removed

    def trim_to(self, count: int) -> None:
        """Keep the first `count` tokens. Raises as `trim`."""
        self.trim(self.offset - count)

    def _trim(self, plan: TrimPlan) -> None:
        pair, offset = None, self.offset - plan.removed
        if plan.source is TrimSource.SINK:
            if plan.recent and self._sink is not None:
                pair = between(self._sink, None, plan.recent)
            self._forget()
        elif plan.source is not TrimSource.RECENT:
            assert self._store is not None
            if plan.source is TrimSource.LAST:
                assert self._last is not None
                pair = between(_joined(self._last, self._read_recent()), None, plan.recent)
            elif plan.recent:
                pair = self._decoded(plan.pages, plan.recent)
            self._store.truncate(plan.pages)
            self._last = None
        if pair is not None:
            self._recent, self._count = None, 0
            self._append(*pair)
        self._count, self.offset = plan.recent, offset

    def _decoded(self, page: int, count: int) -> Pair:
        assert self._store is not None and self._recent is not None
        pages, recent = self._store.read(page, page + 1), self._recent
        return both(lambda side: pages.decode(side, recent[side].dtype)[:, :, :count], (0, 1))

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order: beams, finished sequences, repeats."""
        if self._recent is None:
            return
        self._recent, self._sink, self._last = (
            pair and both(lambda x: x[rows], pair)
            for pair in (self._recent, self._sink, self._last)
        )
        if self._store is not None:
            self._store.select(rows)

    @property
    def nbytes(self) -> int:
        """Allocated bytes: pages with their spare capacity, sink and recent windows."""
        return sum(x.numel() * x.element_size() for x in self._arrays())

    def _arrays(self) -> list[torch.Tensor]:
        pairs = (self._recent, self._sink, self._last)
        windows = [x for pair in pairs if pair is not None for x in pair]
        return [*windows, *(self._store.arrays() if self._store else ())]

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
            sink=self._sink,
            last=self._last,
            pages=self._store.state if self._store is not None and self._store.count else None,
            more=extra_tree,
        )

    def _extra(self) -> tuple[dict, dict]:
        """Entries of the header and tensors that a subclass saves besides."""
        return {}, {}

    def _restore_extra(self, header: dict, tree: dict) -> None:
        """Invert `_extra`, before pages are restored."""

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
        self._recent, self._sink, self._last = (
            self._window_of(state.window(tree, name), transform)
            for name in ("live", "sink", "last")
        )
        self._count = 0 if self._recent is None else self._recent[0].shape[2]
        if header["pages"]:
            if self._recent is None:
                raise ValueError("pages without a recent window")
            self._store = self._new_store(self._recent)
            self._store.restore(tree["pages"], header["pages"])
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


def _joined(first: Pair, second: Pair) -> Pair:
    """Return both windows, one behind the other."""
    return torch.cat([first[0], second[0]], 2), torch.cat([first[1], second[1]], 2)
