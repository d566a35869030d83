"""Pages for Triton: a pool that many caches share, and the pages of one cache in it.

A page is never written to after it was sealed, so a prefix is shared by counting who holds it: rows
of a batch, beams and forked caches point to the same pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cuda_track.codec import Codec, Stored
from cuda_track.kernels.layout import SideLayout, arrange, restore
from cuda_track.sealed import NAMES, as_codes
from mlxkv.config import CacheConfig

GROWTH = 4  # spare room is a quarter of what is stored
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Pool:
    """Pages of one layer. sides: tensors of keys and of values, [pages, G, ...]."""

    def __init__(self):
        self.sides: tuple[Stored, Stored] = ({}, {})
        self.holders: list[int] = []  # of each page
        self._free: list[int] = []

    def add(self, sides: tuple[Stored, Stored]) -> list[int]:
        """Take in pages [n, G, ...] of both sides; they are held once."""
        shapes = tuple({n: (x.shape[1:], x.dtype) for n, x in side.items()} for side in sides)
        count, device = len(sides[0]["words"]), sides[0]["words"].device
        places = self.reserve(count, shapes, device)
        for pool, new in zip(self.sides, sides, strict=True):
            for name, x in new.items():
                pool[name].index_copy_(0, torch.tensor(places, device=device), x)
        return places

    def reserve(self, count: int, shapes: tuple[Shapes, Shapes], device) -> list[int]:
        """Places for `count` pages to be written, held once. shapes: of a page, by name."""
        if len(self._free) < count:
            self._grow(shapes, count - len(self._free), device)
        places = [self._free.pop() for _ in range(count)]
        for place in places:
            self.holders[place] = 1
        return places

    def _grow(self, shapes: tuple[Shapes, Shapes], least: int, device) -> None:
        have = len(self.holders)
        more = max(least, have // GROWTH, 8)
        for pool, new in zip(self.sides, shapes, strict=True):
            for name, (shape, dtype) in new.items():
                room = torch.zeros(have + more, *shape, dtype=dtype, device=device)
                if have:
                    room[:have] = pool[name]
                pool[name] = room
        self.holders += [0] * more
        self._free += range(have + more - 1, have - 1, -1)

    def hold(self, places: list[int]) -> None:
        for place in places:
            self.holders[place] += 1

    def release(self, places: list[int]) -> None:
        for place in reversed(places):  # the lowest are taken first
            self.holders[place] -= 1
            if not self.holders[place]:
                self._free.append(place)

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return len(self.holders) - len(self._free)


@dataclass(frozen=True)
class PoolPages:
    """A snapshot that attention reads. table: [B, most] int32, counts: [B] int32, pages of each row.
    tokens: of the longest row."""

    codecs: tuple[Codec, Codec]
    layouts: tuple[SideLayout, SideLayout]
    sides: tuple[Stored, Stored]
    table: torch.Tensor
    counts: torch.Tensor
    tokens: int

    @property
    def parts(self) -> tuple[PoolPages]:
        """Runs of one transform."""
        return (self,)

    @property
    def stored(self) -> tuple[Stored, Stored]:
        """As plain ops read them; for rows of one length."""
        places = self.table.long()
        return tuple(
            restore({name: x[places] for name, x in side.items()}, at)
            for side, at in zip(self.sides, self.layouts, strict=True)
        )

    def decode(self, side: int, dtype: torch.dtype) -> torch.Tensor:
        """Keys (side 0) or values (1) as attention sees them: [B, G, T, D]."""
        return self.codecs[side].decode(self.stored[side], dtype)


# codec, tensor [B, G, T, D], layout, the side of a pool, places of the pages
Seal = Callable[[Codec, torch.Tensor, SideLayout, Stored, list[int]], None]


class Paged:
    """The sealed pages of one cache: a store, as `sealed.Codes` is one.

    seal: encodes new tokens straight into the pool (`kernels.seal`); none: plain ops do.
    """

    def __init__(
        self,
        config: CacheConfig,
        codecs: tuple[Codec, Codec],
        pool: Pool | None = None,
        seal: Seal | None = None,
    ):
        self.config, self.codecs, self.pool, self.seal = config, codecs, pool or Pool(), seal
        self.layouts = tuple(
            SideLayout(code.spec, code.dims, config.page, keys)
            for code, keys in zip(codecs, (True, False), strict=True)
        )
        self.rows: list[list[int]] = []  # places of the pages of each row of the batch
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def count(self) -> int:
        return max(map(len, self.rows), default=0)

    def make_room(self, pair, count: int) -> None:
        """Room in the pool for `count` pages of each row of keys and values [B, G, T, D]."""
        batch, heads, _, _ = pair[0].shape
        shapes = tuple(at.shapes(heads) for at in self.layouts)
        self.pool.release(self.pool.reserve(batch * count, shapes, pair[0].device))

    def append(self, pair, count: int, start: int = 0) -> None:
        """Encode `count` pages of keys and values [B, G, T, D], from token `start` on."""
        stop = start + count * self.config.page
        pair = tuple(x[:, :, start:stop] for x in pair)
        if self.seal is None:
            encoded = zip(self.codecs, pair, self.layouts, strict=True)
            self._take(tuple(arrange(code.encode(x), at) for code, x, at in encoded))
            return
        batch, heads, _, _ = pair[0].shape
        shapes = tuple(at.shapes(heads) for at in self.layouts)
        places = self.pool.reserve(batch * count, shapes, pair[0].device)
        for code, x, at, side in zip(self.codecs, pair, self.layouts, self.pool.sides, strict=True):
            self.seal(code, x, at, side, places)
        self._hand_out(places, batch, count)

    def _take(self, sides: tuple[Stored, Stored]) -> None:
        """Pages [B, n, G, ...] behind those that are there."""
        batch, count = sides[0]["words"].shape[:2]
        pages = ({name: x.flatten(0, 1) for name, x in side.items()} for side in sides)
        self._hand_out(self.pool.add(tuple(pages)), batch, count)

    def _hand_out(self, places: list[int], batch: int, count: int) -> None:
        """Places of new pages, row by row."""
        self.rows = self.rows or [[] for _ in range(batch)]
        even = len(set(map(len, self.rows))) == 1
        for i, row in enumerate(self.rows):
            row += places[i * count : (i + 1) * count]
        if self._table is not None and even:  # long tables are not made anew for one page
            table, counts = self._table
            new = torch.tensor(places, dtype=torch.int32, device=table.device).view(batch, count)
            self._table = torch.cat([table, new], 1), counts + count
        else:
            self._table = None

    def read(self, start: int, stop: int) -> PoolPages:
        """A snapshot of pages start .. stop - 1."""
        if self._table is None:
            most = self.count
            rows = [row + row[-1:] * (most - len(row)) for row in self.rows]
            device = self.pool.sides[0]["words"].device
            self._table = (
                torch.tensor(rows, dtype=torch.int32, device=device),
                torch.tensor([len(row) for row in self.rows], dtype=torch.int32, device=device),
            )
        table, counts = self._table
        if (start, stop) != (0, self.count):
            table = table[:, start:stop].contiguous()
            counts = (counts - start).clamp(0, stop - start)
        tokens = (stop - start) * self.config.page
        return PoolPages(self.codecs, self.layouts, self.pool.sides, table, counts, tokens)

    def truncate(self, count: int) -> None:
        for row in self.rows:
            self.pool.release(row[count:])
            del row[count:]
        self._table = None

    def select(self, rows: torch.Tensor) -> None:
        """Rows of the batch, in this order: no page is copied."""
        new = [list(self.rows[i]) for i in rows.tolist()]
        for row in new:
            self.pool.hold(row)
        self.truncate(0)
        self.rows = new

    def fork(self) -> Paged:
        """Another cache with the same pages."""
        other = Paged(self.config, self.codecs, self.pool, self.seal)
        other.rows = [list(row) for row in self.rows]
        for row in other.rows:
            self.pool.hold(row)
        return other

    def __deepcopy__(self, memo) -> Paged:
        return self.fork()  # a copy of a cache shares its prefix

    def __del__(self):
        for row in self.rows:
            self.pool.release(row)

    def arrays(self) -> list[torch.Tensor]:
        """What is allocated."""
        return [x for side in self.pool.sides for x in side.values()]

    @property
    def state(self) -> dict[str, Stored]:
        return dict(zip(NAMES, self.read(0, self.count).stored, strict=True))

    def restore(self, state: dict, count: int) -> None:
        """Take over the `count` pages of a state of any store."""
        state = as_codes(state, self.codecs)
        self.truncate(0)
        self.rows = []
        self._take(
            tuple(arrange(state[name], at) for name, at in zip(NAMES, self.layouts, strict=True))
        )
