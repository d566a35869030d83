"""Stores of sealed pages: `Codes` for plain ops, `Records` for kernels. A cache has one of the two.

Both grow and are cut by whole pages, and return the snapshots of `view`. Each restores what the other
saved, so that a cache saved on one machine is read on any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakValueDictionary

import mlx.core as mx

from mlxkv.cache.pages import Pages
from mlxkv.cache.view import (
    BY_OPS,
    PORTABLE,
    TILES,
    CodePages,
    KernelPlan,
    LatentPages,
    Pair,
    RecordPages,
)
from mlxkv.codec import encoding, records
from mlxkv.codec.codec import Codec, Stored, codec
from mlxkv.codec.maps import LayerMaps
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.records import NAMES, record_layout
from mlxkv.metal import attend, launch, seal
from mlxkv.metal.lengths import grown


class Form:
    """Stands for what a trace over pages takes for granted beside shapes."""


_forms: WeakValueDictionary[tuple, Form] = WeakValueDictionary()


class _Store:
    """way: how pages are encoded, of `encoding`."""

    def __init__(
        self,
        config: CacheConfig,
        dims: tuple[int, int],
        layer_maps: LayerMaps | None,
        way: str,
    ):
        self.config, self.dims, self.way = config, dims, way
        self.emulated = False  # whether its kernels are such that no trace can hold them
        self.codecs = tuple(
            Codec(side, dim, config.page, getattr(layer_maps, name))
            if side.calibrated and layer_maps is not None
            else codec(side, dim, config.page)
            for name, side, dim in zip(NAMES, (config.keys, config.values), dims, strict=True)
        )

    def encode_by(self, way: str) -> None:
        """Encode the next pages this way."""
        self.way = way

    @cached_property
    def form(self) -> Form:
        """The same for stores whose pages are read by the same code, with the same transforms."""
        key = type(self), self.config, self.dims, *self._read_by
        return _forms.setdefault(key, Form())

    @property
    def _read_by(self) -> tuple:
        return tuple(code.transform for code in self.codecs)


class Codes(_Store):
    """Sealed pages for plain ops: the arrays of both sides, by (side, name).

    sides: those that it holds.
    """

    sides = NAMES

    def __init__(
        self,
        config: CacheConfig,
        dims: tuple[int, int],
        layer_maps: LayerMaps | None = None,
        way: str = encoding.KERNEL,
    ):
        super().__init__(config, dims, layer_maps, way)
        self.pages = Pages()
        self._whole: CodePages | None = None  # the last snapshot of all pages, until they change

    def __deepcopy__(self, memo):
        other = copy(self)
        other.pages, other._whole = deepcopy(self.pages, memo), None
        return other

    @property
    def count(self) -> int:
        return self.pages.counts[0]

    def append(self, pair: Pair, count: int, start: int = 0) -> None:
        """Encode `count` pages of keys and values [B, G, T, D], from token `start` on."""
        self._whole = None  # a hold on the arrays would have them copied
        stop, encoded = start + count * self.config.page, {}
        for side, code, x in zip(self.sides, self.codecs, pair, strict=False):
            for name, y in code.encode(x[:, :, start:stop], self.way).items():
                encoded[side, name] = y
        self.pages.append(encoded, count)

    def _sides(self, start: int, stop: int) -> dict[str, Stored]:
        return self._by_side(self.pages.read(start, stop))

    def _by_side(self, held: dict) -> dict[str, Stored]:
        """The codes among these arrays, by side and name."""
        out: dict[str, Stored] = {name: {} for name in self.sides}
        for key, x in held.items():
            out[key[0]][key[1]] = x
        return out

    def read(self, start: int, stop: int) -> CodePages:
        """A snapshot of pages start .. stop - 1."""
        held = self.pages.read(start, stop)
        return self._snapshot(held, (stop - start) * self.config.page)

    def whole(self) -> CodePages:
        """A snapshot of all pages."""
        if self._whole is None:
            self._whole = self.read(0, self.count)
        return self._whole

    def make_room(self) -> None:
        """Have the room of steps of fixed shapes."""
        if self.pages.capacity != grown(self.count):
            self._whole = None  # a hold on the arrays
            self.pages.make_room()

    def room(self, arrays: Sequence[mx.array]) -> CodePages:
        """A snapshot of `arrays`, in the order of `self.arrays()`, with their spare room as pages of zeros."""
        held = dict(zip(self.pages.arrays, arrays, strict=True))
        return self._snapshot(held, self.pages.capacity * self.config.page)

    def _snapshot(self, held: dict, tokens: int) -> CodePages:
        """Return what attention reads of these arrays."""
        return CodePages(self.codecs, tuple(self._by_side(held).values()), tokens)

    def truncate(self, count: int) -> None:
        self._whole = None
        self.pages.truncate(count)

    def arrays(self) -> list[mx.array]:
        """All allocated arrays."""
        return list(self.pages.arrays.values())

    @property
    def state(self) -> dict:
        return self._sides(0, self.count)

    def restore(self, state: dict, count: int) -> None:
        """Take over the `count` pages of a state of either store."""
        self._whole = None
        if "records" in state:
            state = records.to_codes(state, self.codecs)
        held = {}
        for side, code in zip(self.sides, self.codecs, strict=False):
            if set(state[side]) != code.spec.tensors:
                raise ValueError(f"arrays {', '.join(sorted(state[side]))} for {side}")
            held |= {(side, name): x for name, x in state[side].items()}
        self.pages.restore(held, count)


class LatentCodes(Codes):
    """Sealed pages of latents: one record, the keys', which is read as keys and as values; the values' side are rotary
    keys, if the config stores them with codes. plan: whether a kernel reads it."""

    def __init__(
        self,
        config: CacheConfig,
        dims: tuple[int, int],
        layer_maps: LayerMaps | None = None,
        way: str = encoding.KERNEL,
        plan: KernelPlan = BY_OPS,
    ):
        super().__init__(config, dims, layer_maps, way)
        self.plan = plan
        self.emulated = plan.make not in (None, mx.fast.metal_kernel, mx.fast.cuda_kernel)
        self.sides = NAMES[: 2 if config.rotary < 16 else 1]

    def read(self, start: int, stop: int) -> LatentPages:
        latents, *rotary = self._sides(start, stop).values()
        tokens, beside = (stop - start) * self.config.page, None
        if rotary:
            beside = self.codecs[1], rotary[0]
        return LatentPages(self.codecs[:1] * 2, (latents, latents), tokens, self.plan, beside)

    def room(self, arrays: Sequence[mx.array]) -> LatentPages:
        """As `Codes.room`."""
        sides: dict[str, Stored] = {name: {} for name in self.sides}
        for (side, name), x in zip(self.pages.arrays, arrays, strict=True):
            sides[side][name] = x
        latents, *rotary = sides.values()
        tokens = self.pages.capacity * self.config.page
        beside = (self.codecs[1], rotary[0]) if rotary else None
        return LatentPages(self.codecs[:1] * 2, (latents, latents), tokens, self.plan, beside)

    @property
    def _read_by(self) -> tuple:
        return *super()._read_by, self.plan.body, self.plan.make


class Records(_Store):
    """Sealed pages for kernels that `make` builds, tiles or the portable ones: a buffer of page
    records, and one of headers for formats that have them."""

    def __init__(
        self,
        config: CacheConfig,
        dims: tuple[int, int],
        make: launch.Factory,
        tiled: bool = False,
        layer_maps: LayerMaps | None = None,
        way: str = encoding.KERNEL,
    ):
        super().__init__(config, dims, layer_maps, way)
        self.layout = record_layout(config, *(code.dims for code in self.codecs))
        body = TILES if tiled else PORTABLE
        self.plan = KernelPlan(body, layout=self.layout, make=make)
        self.emulated = make not in (mx.fast.metal_kernel, mx.fast.cuda_kernel)
        self._sealer = seal.sealer(self.layout)
        self.pages = Pages()

    def __deepcopy__(self, memo):
        other = copy(self)  # all but the pages is shared: MLX's kernel builders cannot be copied
        other.pages = deepcopy(self.pages, memo)
        return other

    @property
    def count(self) -> int:
        return self.pages.counts[0]

    def append(self, pair: Pair, count: int, start: int = 0) -> None:
        """Encode `count` pages of keys and values [B, G, T, D], from token `start` on."""
        self.pages.append(self.encode(pair, count * self.config.page, start), count)

    def encode(self, pair: Pair, tokens: int, start: int) -> Stored:
        """The arrays that `append` would add for whole pages."""
        layout, make, on_cpu = self.layout, self.plan.make, self.way != encoding.KERNEL
        sides = tuple(zip(self.codecs, (layout.keys, layout.values), strict=True))
        if self._sealer is not None and not on_cpu:
            transforms = tuple(code.transform for code in self.codecs)
            ranks = tuple(code.spec.clip_rank(at.dims) for code, at in sides)
            return self._sealer(pair, layout, make, transforms, start, tokens, ranks)
        with mx.stream(mx.cpu if on_cpu else mx.default_device()):
            codes = {}
            for name, x, code in zip(NAMES, pair, self.codecs, strict=True):
                codes[name] = code.encode(x[:, :, start : start + tokens], self.way)
            return records.to_records(codes, self.codecs)

    def snapshot(self, held: Stored, tokens: int) -> RecordPages:
        """Return what attention reads of the first `tokens` of these arrays."""
        buffer, headers = held["records"], held.get("headers")
        return RecordPages(self.codecs, self.plan, buffer, tokens, headers)

    def empty(self) -> Records:
        """A store of the same kind without pages."""
        other = copy(self)
        other.pages = Pages()
        return other

    def is_like(self, other: Codes | Records) -> bool:
        """Return whether the same kernels read the pages of both."""
        kinds = ((type(x), x.config, x.dims, x.way) for x in (self, other))
        return next(kinds) == next(kinds) and self.plan == other.plan

    def transported(self, codecs: tuple[Codec, Codec]) -> dict[str, mx.array]:
        """Its pages, encoded again in the bases of `codecs`. For layouts that the kernel seals: plain ops
        would take some hundred operations a page."""
        pages, layout, make, moved = self.whole(), self.layout, self.plan.make, []
        for i, (old, new) in enumerate(zip(self.codecs, codecs, strict=True)):
            x = attend.unseal_side(
                *(pages.buffer, pages.records, layout, i == 0, mx.float32, make),
                headers=pages.headers,
            )
            if old.transform is not new.transform:
                x = x @ (old.transform.up @ new.transform.down)
            moved.append(x)
        ranks = tuple(
            code.spec.clip_rank(x.shape[3]) for code, x in zip(codecs, moved, strict=True)
        )
        return {
            "records": seal.seal(tuple(moved), layout, make, (None, None), 0, pages.tokens, ranks)
        }

    def read(self, start: int, stop: int) -> RecordPages:
        """A snapshot of pages start .. stop - 1; from the first page on it copies nothing."""
        arrays = self.pages.read(start, stop) if start else self.pages.arrays
        return self.snapshot(arrays, (stop - start) * self.config.page)

    def whole(self) -> RecordPages:
        """A snapshot of all pages."""
        return self.read(0, self.count)

    @property
    def _read_by(self) -> tuple:
        return *super()._read_by, self.plan.body, self.plan.make

    def make_room(self) -> None:
        """As `Codes.make_room`."""
        self.pages.make_room()

    def room(self, arrays: Sequence[mx.array]) -> RecordPages:
        """As `Codes.room`."""
        held = dict(zip(self.pages.arrays, arrays, strict=True))
        return self.snapshot(held, self.pages.capacity * self.config.page)

    def truncate(self, count: int) -> None:
        self.pages.truncate(count)

    def arrays(self) -> list[mx.array]:
        """All allocated arrays."""
        return list(self.pages.arrays.values())

    @property
    def held(self) -> dict:
        """The arrays of its pages."""
        return self.pages.read()

    @property
    def state(self) -> dict:
        """Return what has to be saved of them."""
        return self.held

    def restore(self, state: dict, count: int) -> None:
        """Take over the `count` pages of a state of either store. Raises ValueError for records of another layout."""
        if "records" not in state:
            state = records.to_records(state, self.codecs)
        state = {name: state[name] for name in ("records", "headers") if name in state}
        words = {"records": self.layout.words, "headers": self.layout.header_words}
        for name, x in state.items():
            if x.shape[-1] != words[name]:
                raise ValueError(f"{name} of {x.shape[-1]} words in place of {words[name]}")
        self.pages.restore(state, count)

    def take_over(self, held: dict, count: int) -> None:
        """Take over the `count` pages of `held`, of a store like this one."""
        self.pages.restore(held, count)


def codes_of(store: Codes | Records) -> dict[str, Stored]:
    """The arrays of plain ops for the pages of either store, which has some."""
    state = store.state
    return records.to_codes(state, store.codecs) if "records" in state else state


@dataclass
class Contents:
    """What a cache holds, as `CompressedKVCache.contents` shows it.

    layer_maps: of the layer. plan, way: kernels and encoding of stores that it makes. offset: tokens
    read. live, sink: keys and values in full precision, [B, G, T, D], or None. last: exact tokens of
    the page sealed last, or None. store: of the sealed pages, or None.
    """

    config: CacheConfig
    layer_maps: LayerMaps | None
    plan: KernelPlan | None
    way: str
    offset: int
    live: Pair | None
    sink: Pair | None
    last: Pair | None
    store: Codes | Records | None
