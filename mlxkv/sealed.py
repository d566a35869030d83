"""Where sealed pages live: `Codes` for plain ops, `Records` for kernels. One cache, one of the two.

Both are stores that grow and are cut by whole pages, and hand out snapshots that attention reads.
Each restores what the other saved, so that a cache saved on one machine is read on any other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from copy import copy, deepcopy
from dataclasses import dataclass

import mlx.core as mx

from mlxkv import balancing, channels, encoding, exchange, kernels, records, selftest, tiles, trust
from mlxkv.calibrated import Rotations
from mlxkv.codec import Codec, Stored, codec
from mlxkv.config import CacheConfig
from mlxkv.metal import launch
from mlxkv.pages import Pages

Pair = tuple[mx.array, mx.array]
NAMES = ("keys", "values")


@dataclass(frozen=True)
class CodePages:
    """Pages as plain ops read them. tokens: in these pages."""

    codecs: tuple[Codec, Codec]
    stored: tuple[Stored, Stored]
    tokens: int

    @property
    def parts(self) -> tuple[CodePages]:
        """Runs of one transform."""
        return (self,)

    def scorer(self) -> Callable[[mx.array], mx.array]:
        """q [B, G, N, D] float32 -> q . k^ for every token: [B, G, N, T] float32."""
        return lambda q: self.codecs[0].scores(q, self.stored[0])

    def decode(self, side: int, dtype: mx.Dtype) -> mx.array:
        """Keys (side 0) or values (1) as attention sees them: [B, G, T, D]."""
        return self.codecs[side].decode(self.stored[side], dtype)

    def between(self, sink: Pair | None, live: Pair) -> Pair:
        """Keys and values: sink, these pages in the stored domain, live: [B, G, T, R] in the dtype of
        live."""
        pages = (
            code.decode_stored(stored, x.dtype)
            for code, stored, x in zip(self.codecs, self.stored, live, strict=True)
        )
        return _joined(sink, pages, live)


@dataclass(frozen=True)
class RecordPages:
    """Pages as the kernels read them: the first `tokens` / 16 records of `buffer`, and the headers
    of the pages, where the format has any."""

    codecs: tuple[Codec, Codec]
    layout: kernels.RecordLayout
    buffer: mx.array
    tokens: int
    make: launch.Factory
    tiled: bool = False
    headers: mx.array | None = None

    @property
    def parts(self) -> tuple[RecordPages]:
        """Runs of one transform."""
        return (self,)

    def scorer(self) -> Callable[[mx.array], mx.array]:
        """q [B, G, N, D] float32 -> q . k^ for every token: [B, G, N, T] float32."""
        turn = self.codecs[0].transform
        if self._has_signs(0) or turn is None:
            keys = self.decode(0, mx.float32).swapaxes(-1, -2)
            return lambda q: q @ keys
        count = self.tokens // records.TOKENS  # queries are turned, not the many keys
        keys = kernels.unseal_side(
            *(self.buffer, count, self.layout, True, mx.float32, self.make), headers=self.headers
        ).swapaxes(-1, -2)
        return lambda q: turn.query(q) @ keys

    def decode(self, side: int, dtype: mx.Dtype) -> mx.array:
        """Keys (side 0) or values (1) as attention sees them: [B, G, T, D]."""
        count = self.tokens // records.TOKENS
        code = self.codecs[side]
        if self._has_signs(side):
            return code.decode(self._codes(side), dtype)
        work = code.work_dtype(dtype)
        x = kernels.unseal_side(
            self.buffer, count, self.layout, side == 0, work, self.make, headers=self.headers
        )
        return code.restore(x, dtype)

    def between(self, sink: Pair | None, live: Pair) -> Pair:
        """Keys and values: sink, these pages in the stored domain, live: [B, G, T, R] in the dtype of
        live."""
        count = self.tokens // records.TOKENS
        if self._has_signs(0):
            keys = self.codecs[0].decode_stored(self._codes(0), live[0].dtype)
            rest = self.layout, False, live[1].dtype, self.make, self.headers
            return _joined(sink, (keys, kernels.unseal_side(self.buffer, count, *rest)), live)
        rest = self.layout, live[0].dtype, self.make, sink, live, self.headers
        return kernels.unseal(self.buffer, count, *rest)

    def _has_signs(self, side: int) -> bool:
        """What the signs of a residual stage stand for takes products, which unseal has not."""
        return (self.layout.keys, self.layout.values)[side].signs

    def _codes(self, side: int) -> Stored:
        used = {"records": self.buffer[:, :, : self.tokens // records.TOKENS]}
        if self.headers is not None:
            used["headers"] = self.headers[:, :, : self.tokens // self.codecs[0].page]
        return exchange.to_codes(used, self.codecs, self.layout)[NAMES[side]]


def _joined(sink: Pair | None, pages: Iterable[mx.array], live: Pair) -> Pair:
    parts = zip(pages, live, strict=True) if sink is None else zip(sink, pages, live, strict=True)
    return tuple(mx.concatenate(part, axis=2) for part in parts)


class _Store:
    def __init__(self, config: CacheConfig, dims: tuple[int, int], rotations: Rotations | None):
        self.config, self.dims, self.way = config, dims, encoding.now()
        self.codecs = tuple(
            Codec(side, dim, config.page, getattr(rotations, name))
            if side.calibrated and rotations is not None
            else codec(side, dim, config.page)
            for name, side, dim in zip(NAMES, (config.keys, config.values), dims, strict=True)
        )

    def __deepcopy__(self, memo):
        other = copy(self)  # all but the pages is shared: MLX's kernel builders cannot be copied
        other._pages = deepcopy(self._pages, memo)
        return other


class Codes(_Store):
    """Sealed pages for plain ops: two sets of arrays."""

    def __init__(
        self, config: CacheConfig, dims: tuple[int, int], rotations: Rotations | None = None
    ):
        super().__init__(config, dims, rotations)
        self._pages = (Pages(), Pages())

    @property
    def count(self) -> int:
        return self._pages[0].count

    def append(self, pair: Pair, count: int, start: int = 0) -> None:
        """Encode `count` pages of keys and values [B, G, T, D], from token `start` on."""
        stop = start + count * self.config.page
        for pages, code, x in zip(self._pages, self.codecs, pair, strict=True):
            pages.append(code.encode(x[:, :, start:stop], self.way), count)

    def read(self, start: int, stop: int) -> CodePages:
        """A snapshot of pages start .. stop - 1."""
        stored = tuple(pages.read(start, stop) for pages in self._pages)
        return CodePages(self.codecs, stored, (stop - start) * self.config.page)

    def truncate(self, count: int) -> None:
        for pages in self._pages:
            pages.truncate(count)

    def arrays(self) -> list[mx.array]:
        """What is allocated."""
        return [x for pages in self._pages for x in pages.arrays()]

    @property
    def state(self) -> dict:
        return dict(zip(NAMES, (pages.read() for pages in self._pages), strict=True))

    def restore(self, state: dict, count: int) -> None:
        """Take over the `count` pages of a state of either store."""
        if "records" in state:
            state = exchange.to_codes(state, self.codecs, _layout(self))
        for name, code, pages in zip(NAMES, self.codecs, self._pages, strict=True):
            if set(state[name]) != code.method.names(code.spec):
                raise ValueError(f"arrays {', '.join(sorted(state[name]))} for {name}")
            pages.restore(state[name], count)


class Records(_Store):
    """Sealed pages for kernels: one buffer of page records."""

    def __init__(
        self,
        config: CacheConfig,
        dims: tuple[int, int],
        make: launch.Factory,
        tiled: bool = False,
        rotations: Rotations | None = None,
    ):
        super().__init__(config, dims, rotations)
        self.make, self.tiled = make, tiled
        self.layout = _layout(self)
        self._pages = Pages()

    @property
    def count(self) -> int:
        return self._pages.count

    def append(self, pair: Pair, count: int, start: int = 0) -> None:
        """Encode `count` pages of keys and values [B, G, T, D], from token `start` on."""
        self._pages.append(self.encode(pair, count * self.config.page, start), count)

    def encode(self, pair: Pair, tokens: int, start: int) -> Stored:
        """What `append` would add for whole pages, not added."""
        on_cpu = self.way != encoding.KERNEL
        by_channels = not on_cpu and channels.why_not(self.layout) is None
        if on_cpu or not (by_channels or self.layout.sealed_by_kernel):
            with mx.stream(mx.cpu if on_cpu else mx.default_device()):
                sides, codes = (self.layout.keys, self.layout.values), {}
                for name, code, x, at in zip(NAMES, self.codecs, pair, sides, strict=True):
                    by_kernel = not on_cpu and at.outer
                    helpers = balancing.helpers(self.make, code.page, at.dims) if by_kernel else {}
                    ours = x[:, :, start : start + tokens]
                    codes[name] = code.encode(ours, self.way, **helpers)
                return exchange.to_records(codes, self.codecs, self.layout)
        transforms = tuple(code.transform for code in self.codecs)
        sides = (self.layout.keys, self.layout.values)
        ranks = tuple(
            code.spec.clip_rank(at.dims) for code, at in zip(self.codecs, sides, strict=True)
        )
        rest = self.layout, self.make, transforms, start, tokens, ranks
        return channels.seal(pair, *rest) if by_channels else {"records": kernels.seal(pair, *rest)}

    def empty(self) -> Records:
        """Another one, of the same kind, without pages."""
        other = copy(self)
        other._pages = Pages()
        return other

    def is_like(self, other: Codes | Records) -> bool:
        """Whether the same kernels read the pages of both."""
        if type(other) is not Records or self.make is not other.make:
            return False
        kinds = ((x.config, x.dims, x.tiled, x.way) for x in (self, other))
        return next(kinds) == next(kinds)

    def transported(self, codecs: tuple[Codec, Codec]) -> dict[str, mx.array]:
        """Its pages as the bases of `codecs` would have stored them. For layouts that the kernel seals:
        plain ops would be some hundred operations a page."""
        buffer, *shared = self._pages.arrays()
        headers, tokens, moved = (shared or [None])[0], self.count * self.config.page, []
        for i, (old, new) in enumerate(zip(self.codecs, codecs, strict=True)):
            x = kernels.unseal_side(
                *(buffer, tokens // records.TOKENS, self.layout, i == 0, mx.float32, self.make),
                headers=headers,
            )
            if old.transform is not new.transform:
                x = x @ (old.transform.up @ new.transform.down)
            moved.append(x)
        ranks = tuple(
            code.spec.clip_rank(x.shape[3]) for code, x in zip(codecs, moved, strict=True)
        )
        sealed = kernels.seal(tuple(moved), self.layout, self.make, (None, None), 0, tokens, ranks)
        return {"records": sealed}

    def read(self, start: int, stop: int) -> RecordPages:
        """A snapshot of pages start .. stop - 1; from the first page on it copies nothing."""
        each = self.config.page // records.TOKENS
        buffer, *shared = self._pages.arrays()
        if start:
            buffer = buffer[:, :, start * each : stop * each]
            shared = [x[:, :, start:stop] for x in shared]
        tokens = (stop - start) * self.config.page
        return RecordPages(self.codecs, self.layout, buffer, tokens, self.make, self.tiled, *shared)

    def truncate(self, count: int) -> None:
        self._pages.truncate(count)

    def arrays(self) -> list[mx.array]:
        """What is allocated."""
        return self._pages.arrays()

    @property
    def state(self) -> dict:
        return self._pages.read()

    def restore(self, state: dict, count: int) -> None:
        """Take over the `count` pages of a state of either store."""
        if "records" not in state:
            state = exchange.to_records(state, self.codecs, self.layout)
        self._pages.restore(state, count)


def _layout(store: _Store) -> kernels.RecordLayout:
    return kernels.record_layout(store.config, *(code.dims for code in store.codecs))


def codes_of(store: Codes | Records) -> dict[str, Stored]:
    """What the arrays of plain ops would be, of either store, which has pages."""
    state = store.state
    return exchange.to_codes(state, store.codecs, _layout(store)) if "records" in state else state


FAILED = "its kernels failed their test here"  # or were switched off: what should run and does not


def why_not(
    config: CacheConfig,
    dims: tuple[int, int],
    dtype: mx.Dtype,
    case: selftest.Case | None = None,
) -> str | None:
    """Why no kernel runs on such pages, windows of `dtype`, here, or None. The first question for
    a format builds its kernels and tries them. case: how the model attends, where that is known."""
    make = launch.factory()
    if make is None:
        return launch.absent()
    if reason := why_none(config, dims):
        return reason
    if why_no_tiles(config, dims, dtype, case) is None:
        return None  # the portable body would be built in vain
    layout = kernels.record_layout(config, *config.dims(*dims))
    reason = None
    if make is mx.fast.metal_kernel:
        trust.wait(layout, dims[0], dtype, tiled=False)
        reason = trust.why_not(layout, dims[0], dtype, tiled=False)
    if reason := reason or selftest.fault(config, dims[0], dtype, make, case=case):
        return f"{FAILED}: {reason}"
    return None


def why_none(config: CacheConfig, dims: tuple[int, int]) -> str | None:
    """Why no machine has kernels for such pages, or None."""
    for i, (side, dim) in enumerate(zip((config.keys, config.values), dims, strict=True)):
        stored = side.dims(dim)
        if reason := records.why_not(side.quantizer, stored, config.page, keys=i == 0):
            return reason
        if records.layout(side.quantizer, stored, config.page, i == 0).saves_nothing(dim):
            return f"{stored} float16 dims would take the room of {dim} in records"
    if dims[0] != dims[1]:
        return f"keys of {dims[0]} and values of {dims[1]} dims have no kernel yet"
    return None


def why_no_tiles(
    config: CacheConfig,
    dims: tuple[int, int],
    dtype: mx.Dtype,
    case: selftest.Case | None = None,
) -> str | None:
    """Why the portable kernels decode such pages here and not the tiles, or None. For pages that
    have kernels."""
    if os.environ.get(launch.TILES_SWITCH) == "0":
        return f"{launch.TILES_SWITCH}=0"
    if off := launch.switched_off(launch.TILES):
        return off
    make, layout = launch.factory(), kernels.record_layout(config, *config.dims(*dims))
    if make is mx.fast.metal_kernel:
        trust.wait(layout, dims[0], dtype)
    reason = tiles.why_not(layout, dims[0], dtype, make)
    return reason or selftest.fault(config, dims[0], dtype, make, tiled=True, case=case)


def decoder(
    config: CacheConfig,
    dims: tuple[int, int],
    dtype: mx.Dtype,
    case: selftest.Case | None = None,
) -> str:
    """What decodes such pages here, for reports: tile kernels, kernels, or plain ops and why."""
    if reason := why_not(config, dims, dtype, case):
        return f"plain ops ({reason})"
    return "kernels" if why_no_tiles(config, dims, dtype, case) else "tile kernels"


def store(
    config: CacheConfig,
    dims: tuple[int, int],
    dtype: mx.Dtype,
    rotations: Rotations | None = None,
) -> Codes | Records:
    """An empty store for heads of these (key, value) dims: records where kernels can run.

    rotations: of the layer, for calibrated sides.
    """
    if why_not(config, dims, dtype) is None:
        tiled = why_no_tiles(config, dims, dtype) is None
        return Records(config, dims, launch.factory(), tiled, rotations)
    return Codes(config, dims, rotations)
