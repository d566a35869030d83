"""Stores of quantized pages: `Codes` for plain ops, `Records` for kernels. A cache has one of the two.

Both grow and are cut by whole pages, and return the snapshots of `view`. Each restores what the other
saved, so that a cache saved on one machine is read on any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy, deepcopy
from functools import cached_property
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import mlx.core as mx

from mlxkv.cache.backends import PLAIN_OPS, Backend, PortableBackend
from mlxkv.cache.pages import Name, Named, Pages
from mlxkv.cache.view import CodePages, LatentPages, Pair, RecordPages
from mlxkv.codec import records
from mlxkv.codec.codec import Codec, Stored, codec
from mlxkv.codec.maps import LayerMaps
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.layout import TOKENS
from mlxkv.formats.records import NAMES, record_layout
from mlxkv.metal import quantize
from mlxkv.metal.attend import Run, dequantize_side


class PageKind:
    """Identity of the constants, other than shapes, in a trace over pages."""


_forms: WeakValueDictionary[tuple[object, ...], PageKind] = WeakValueDictionary()


Self = TypeVar("Self", bound="PageStore[Any, Any]")
Snapshot = TypeVar("Snapshot", CodePages, RecordPages)  # that a kind of store returns


class PageStore(Generic[Name, Snapshot]):
    """Quantized pages and what encodes more of them. A subclass defines `encode` and `snapshot`.

    backend: the code that reads them.
    """

    backend: Backend = PLAIN_OPS

    def __init__(
        self, config: CacheConfig, dims: tuple[int, int], layer_maps: LayerMaps | None = None
    ):
        self.config, self.dims = config, dims
        self.pages: Pages[Name] = Pages()
        self._all: Snapshot | None = None  # the last `whole`, until pages change

        def codec_of(name: str, dim: int) -> Codec:
            side = getattr(config, name)
            if side.calibrated and layer_maps is not None:
                return Codec(side, dim, config.page, getattr(layer_maps, name))
            return codec(side, dim, config.page)

        self.codecs = codec_of("keys", dims[0]), codec_of("values", dims[1])

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        return self._with_pages(deepcopy(self.pages, memo))

    def empty(self: Self) -> Self:
        """Return a store of the same kind without pages."""
        return self._with_pages(Pages())

    def _with_pages(self: Self, pages: Pages[Any]) -> Self:
        store = copy(self)  # all but the pages is shared: MLX's kernel builders cannot be copied
        store.pages, store._all = pages, None
        return store

    @cached_property
    def form(self) -> PageKind:
        """An object shared by stores with the same backend and transforms."""
        transforms = (code.transform for code in self.codecs)
        key = type(self), self.config, self.dims, *transforms, self.backend
        return _forms.setdefault(key, PageKind())

    @property
    def count(self) -> int:
        return self.pages.counts[0]

    def encode(self, pair: Pair, tokens: int, start: int) -> Named[Name]:
        """Return the arrays of whole pages: `tokens` of keys and values [B, G, T, D], from token `start` on."""
        raise NotImplementedError

    def snapshot(self, arrays: Named[Name], tokens: int) -> Snapshot:
        """Return the first `tokens` of these arrays for attention to read."""
        raise NotImplementedError

    def append(self, pair: Pair, count: int, start: int = 0) -> None:
        """Encode `count` pages of keys and values [B, G, T, D], from token `start` on."""
        self._all = None  # a reference to the arrays would make MLX copy them
        self.pages.append(self.encode(pair, count * self.config.page, start), count)

    def read(self, start: int, stop: int) -> Snapshot:
        """Return a snapshot of pages start .. stop - 1."""
        return self.snapshot(self.pages.read(start, stop), (stop - start) * self.config.page)

    def read_all(self) -> Snapshot | None:
        """Return a snapshot of all pages, or None for none."""
        if self._all is None and self.count:
            self._all = self.read(0, self.count)
        return self._all

    def reserve_slack(self) -> None:
        """Reserve the slack of steps of fixed shapes."""
        self._all = None
        self.pages.reserve_slack()

    def whole_buffers(self, arrays: Sequence[mx.array]) -> Snapshot:
        """Return a snapshot of `arrays`, in the order of `self.arrays()`, with their spare capacity as pages of
        zeros."""
        named = dict(zip(self.pages.arrays, arrays, strict=True))
        return self.snapshot(named, self.pages.capacity * self.config.page)

    def truncate(self, count: int) -> None:
        self._all = None
        self.pages.truncate(count)

    def arrays(self) -> list[mx.array]:
        """All allocated arrays."""
        return list(self.pages.arrays.values())


class Codes(PageStore[tuple[str, str], CodePages]):
    """Quantized pages for plain ops: the arrays of both sides, by (side, name).

    sides: those that it holds.
    """

    sides = NAMES

    def encode(self, pair: Pair, tokens: int, start: int) -> Named[tuple[str, str]]:
        codecs = self.codecs[: len(self.sides)]
        encoded = PLAIN_OPS.quantize(pair, codecs, start, tokens)
        sides = zip(self.sides, encoded, strict=True)
        return {(side, name): y for side, codes in sides for name, y in codes.items()}

    def _by_side(self, arrays: Named[tuple[str, str]]) -> dict[str, Stored]:
        """Return the codes among these arrays, by side and name."""
        out: dict[str, Stored] = {name: {} for name in self.sides}
        for (side, name), x in arrays.items():
            out[side][name] = x
        return out

    def snapshot(self, arrays: Named[tuple[str, str]], tokens: int) -> CodePages:
        keys, values = self._by_side(arrays).values()
        return CodePages(self.codecs, (keys, values), tokens)

    @property
    def state(self) -> dict[str, Stored]:
        return self._by_side(self.pages.read())

    def restore(self, state: dict[str, Any], count: int) -> None:
        """Restore `count` pages from the state of either store."""
        self._all = None
        if "records" in state:
            state = records.to_codes(state, self.codecs)
        arrays: Named[tuple[str, str]] = {}
        for side, code in zip(self.sides, self.codecs, strict=False):
            if set(state[side]) != code.quantizer.tensors:
                raise ValueError(f"arrays {', '.join(sorted(state[side]))} for {side}")
            arrays |= {(side, name): x for name, x in state[side].items()}
        self.pages.restore(arrays, count)


class LatentCodes(Codes):
    """Quantized pages of latents: one record, the keys', which is read as keys and as values; the values' side are
    rotary keys, if the config stores them with codes."""

    def __init__(
        self,
        config: CacheConfig,
        dims: tuple[int, int],
        layer_maps: LayerMaps | None = None,
        backend: Backend = PLAIN_OPS,
    ):
        super().__init__(config, dims, layer_maps)
        self.backend = backend
        self.sides = NAMES[: 2 if config.rotary < 16 else 1]

    def snapshot(self, arrays: Named[tuple[str, str]], tokens: int) -> LatentPages:
        latents, *rotary = self._by_side(arrays).values()
        (code, rotary_code), twice = self.codecs, (latents, latents)
        coded = (rotary_code, rotary[0]) if rotary else None
        return LatentPages((code, code), twice, tokens, self.backend, coded)


class Records(PageStore[str, RecordPages]):
    """Quantized pages for kernels: a buffer of page records, and one of headers for formats that have them."""

    def __init__(
        self,
        config: CacheConfig,
        dims: tuple[int, int],
        backend: PortableBackend,
        layer_maps: LayerMaps | None = None,
    ):
        super().__init__(config, dims, layer_maps)
        self.layout = record_layout(config, *(code.dims for code in self.codecs))
        self.backend: Backend = backend
        self._quantize = backend.quantize
        self.transforms = self.codecs[0].transform, self.codecs[1].transform

    def encode(self, pair: Pair, tokens: int, start: int) -> Stored:
        return self._quantize(pair, self.codecs, self.layout, start, tokens)

    def of_many(self, heads: int) -> Records:
        """Return an empty store of the same kind for the pages of several sequences."""
        return self._with_pages(Pages.of_many(self.layout, self.config.page, heads))

    def snapshot(self, arrays: Stored, tokens: int) -> RecordPages:
        buffer, headers = arrays["records"], arrays.get("headers")
        page = self.config.page // TOKENS
        run = Run(buffer, tokens // TOKENS, self.layout, page, self.transforms, headers)
        return RecordPages(self.codecs, self.backend, run)

    def is_like(self, store: PageStore[Any, Any]) -> bool:
        """Return whether the same kernels read the pages of both."""
        if type(self) is not type(store) or self.backend != store.backend:
            return False
        return self.config == store.config and self.dims == store.dims

    def transported(self, codecs: tuple[Codec, Codec]) -> dict[str, mx.array]:
        """Return the pages re-encoded in the bases of `codecs`.

        For layouts that the kernel quantizes: plain ops would need some hundred operations per page.
        """
        pages, layout, builder = self.read(0, self.count), self.layout, self.backend.builder

        def side(i: int) -> mx.array:
            x = dequantize_side(pages.run, i == 0, mx.float32, builder)
            return moved(x, self.codecs[i], codecs[i])

        pair = side(0), side(1)
        ranks = quantize.clip_ranks(codecs, (pair[0].shape[3], pair[1].shape[3]))
        return {
            "records": quantize.quantize_pages(
                pair, layout, builder, (None, None), 0, pages.tokens, ranks
            )
        }

    def read(self, start: int, stop: int) -> RecordPages:
        """Implement `PageStore.read`; no copy if `start` is 0."""
        if start:
            return super().read(start, stop)
        return self.snapshot(self.pages.arrays, stop * self.config.page)

    @property
    def state(self) -> Stored:
        """Return the arrays to save."""
        return self.pages.read()

    def restore(self, state: dict[str, Any], count: int) -> None:
        """Take over the `count` pages of a state of either store. Raises ValueError for records of another layout."""
        self._all = None
        if "records" not in state:
            state = records.to_records(state, self.codecs)
        state = {name: state[name] for name in ("records", "headers") if name in state}
        words = {"records": self.layout.words, "headers": self.layout.header_words}
        for name, x in state.items():
            if x.shape[-1] != words[name]:
                raise ValueError(f"{name} of {x.shape[-1]} words in place of {words[name]}")
        self.pages.restore(state, count)


def codes_of(store: Codes | Records) -> dict[str, Stored]:
    """Return the plain-ops arrays of either store, which must have pages."""
    if isinstance(store, Codes):
        return store.state
    return records.to_codes(store.state, store.codecs)


def moved(values: mx.array, old: Codec, new: Codec) -> mx.array:
    """Convert values from the stored domain of `old` to that of `new`, both with a basis that follows the text."""
    if old.transform is new.transform:
        return values
    assert old.transform is not None and new.transform is not None
    return values @ (old.transform.up @ new.transform.down)
