"""Where sealed pages live: `Codes` for plain ops, `Paged` for Triton, `Records` for Metal. One cache, one store.

A store grows and is truncated by whole pages, hands out snapshots that attention reads (`view`), and
restores what any store of either track saved.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cuda_track.cache.view import CodePages, Pair
from cuda_track.codec.codec import Codec, Stored, codec
from cuda_track.codec.maps import LayerMaps
from cuda_track.codec.records import as_codes, to_records
from cuda_track.kernels import layout
from cuda_track.kernels.pool import Pool, PoolPages
from cuda_track.mps.pages import RecordPages
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.records import NAMES, layout_of

GROWTH = 16  # spare room is at most 1/16 of what is stored
# codec, tensor [B, G, T, D], layout, the side of a pool, places of the pages
Seal = Callable[[Codec, torch.Tensor, layout.SideLayout, Stored, list[int]], None]


def codecs_of(
    config: CacheConfig, dims: tuple[int, int], maps: LayerMaps | None, device: torch.device
) -> tuple[Codec, Codec]:
    """The codecs of keys and of values, for heads of these dims."""
    made = maps and maps.to(device)
    return tuple(
        Codec(side, dim, config.page, getattr(made, name), device)
        if side.calibrated and made is not None
        else codec(side, dim, config.page, device)
        for name, side, dim in zip(NAMES, (config.keys, config.values), dims, strict=True)
    )


class Pages:
    """Named tensors with the rows of all pages on axis 2, a fixed number for each page."""

    def __init__(self):
        self.count = self.capacity = 0
        self._arrays: Stored = {}

    def append(self, encoded: Stored, count: int) -> None:
        """Add `count` pages."""
        old, stop = self.count, self.count + count
        if stop > self.capacity:
            self._grow(encoded, count)
        else:
            for name, x in encoded.items():
                rows = x.shape[2] // count
                self._arrays[name][:, :, old * rows : stop * rows] = x
        self.count = stop

    def _grow(self, encoded: Stored, count: int) -> None:
        spare, kept = max(0, self.count // GROWTH - count), self.read()
        for name, x in encoded.items():
            rows = x.shape[2] // count
            room = [x.new_zeros(*x.shape[:2], spare * rows, x.shape[3])] if spare else []
            parts = [*([kept[name]] if self.count else []), x, *room]
            self._arrays[name] = torch.cat(parts, 2) if len(parts) > 1 else x
        self.capacity = self.count + count + spare

    def read(self, start: int = 0, stop: int | None = None) -> Stored:
        """The tensors of pages start .. stop - 1, of all by default."""
        stop, out = self.count if stop is None else stop, {}
        for name, x in self._arrays.items():
            rows = x.shape[2] // self.capacity
            out[name] = x[:, :, start * rows : stop * rows]
        return out

    def truncate(self, count: int) -> None:
        """Keep the first `count` pages; give back more room than growing leaves."""
        kept = self.read(0, count) if self.capacity - count > count // GROWTH else None
        self.count = count
        if kept is not None:
            self.restore(kept if count else {}, count)

    def restore(self, arrays: Stored, count: int) -> None:
        """Hold copies of the tensors of exactly `count` pages."""
        for name, x in arrays.items():
            if x.shape[2] % count:
                raise ValueError(f"{x.shape[2]} rows of {name} in {count} pages")
        self._arrays = {name: x.clone() for name, x in arrays.items()}
        self.count = self.capacity = count

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        if self.count:
            self.restore({name: x[rows] for name, x in self.read().items()}, self.count)

    def arrays(self) -> list[torch.Tensor]:
        """Return what is allocated, spare room included."""
        return list(self._arrays.values())


class _Grown:
    """A store that holds `Pages`, one set or one for each side."""

    def __init__(self, config: CacheConfig, codecs: tuple[Codec, Codec], sets: int):
        self.config, self.codecs = config, codecs
        self._pages = tuple(Pages() for _ in range(sets))

    @property
    def count(self) -> int:
        return self._pages[0].count

    def _encoded(self, pair: Pair, count: int, start: int) -> list[Stored]:
        stop = start + count * self.config.page
        both = zip(self.codecs, pair, strict=True)
        return [code.encode(x[:, :, start:stop]) for code, x in both]

    def truncate(self, count: int) -> None:
        for pages in self._pages:
            pages.truncate(count)

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        for pages in self._pages:
            pages.select(rows)

    def arrays(self) -> list[torch.Tensor]:
        """Return what is allocated."""
        return [x for pages in self._pages for x in pages.arrays()]


class Codes(_Grown):
    """Sealed pages for plain ops: a set of tensors for each side."""

    def __init__(self, config: CacheConfig, codecs: tuple[Codec, Codec]):
        super().__init__(config, codecs, sets=2)

    def append(self, pair: Pair, count: int, start: int = 0) -> None:
        """Encode `count` pages of keys and values [B, G, T, D], from token `start` on."""
        encoded = self._encoded(pair, count, start)
        for pages, x in zip(self._pages, encoded, strict=True):
            pages.append(x, count)

    def read(self, start: int, stop: int) -> CodePages:
        """A snapshot of pages start .. stop - 1."""
        stored = tuple(pages.read(start, stop) for pages in self._pages)
        return CodePages(self.codecs, stored, (stop - start) * self.config.page)

    @property
    def state(self) -> dict[str, Stored]:
        return {name: pages.read() for name, pages in zip(NAMES, self._pages, strict=True)}

    def restore(self, state: dict, count: int) -> None:
        """Take over the `count` pages of a state of any store."""
        state = as_codes(state, self.codecs)
        held = [state[name] for name in NAMES]
        for x, pages in zip(held, self._pages, strict=True):
            pages.restore(x, count)


class Records(_Grown):
    """Sealed pages in one buffer of page records; plain ops encode."""

    def __init__(self, config: CacheConfig, codecs: tuple[Codec, Codec]):
        super().__init__(config, codecs, sets=1)
        self.layout = layout_of(codecs)

    def append(self, pair: Pair, count: int, start: int = 0) -> None:
        """Encode `count` pages of keys and values [B, G, T, D], from token `start` on."""
        codes = dict(zip(NAMES, self._encoded(pair, count, start), strict=True))
        self._pages[0].append(to_records(codes, self.codecs), count)

    def read(self, start: int, stop: int) -> RecordPages:
        """A snapshot of pages start .. stop - 1; from the first page on it copies nothing."""
        pages = self._pages[0]
        buffer, *headers = pages.read(start).values() if start else pages.arrays()
        tokens = (stop - start) * self.config.page
        return RecordPages(
            self.codecs, self.layout, buffer, headers[0] if headers else None, tokens
        )

    @property
    def state(self) -> Stored:
        return self._pages[0].read()

    def restore(self, state: dict, count: int) -> None:
        """Take over the `count` pages of a state of any store."""
        records = state if "records" in state else to_records(state, self.codecs)
        self._pages[0].restore(records, count)


class Paged:
    """Sealed pages for Triton: a block table into a pool that other caches may share.

    seal: encodes new tokens straight into the pool (`launch.seal`); None: plain ops do.
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
            layout.SideLayout(code.spec, code.dims, config.page, keys)
            for code, keys in zip(codecs, (True, False), strict=True)
        )
        self.rows: list[list[int]] = []  # places of the pages of each row of the batch
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def count(self) -> int:
        return max(map(len, self.rows), default=0)

    def append(self, pair: Pair, count: int, start: int = 0) -> None:
        """Encode `count` pages of keys and values [B, G, T, D], from token `start` on."""
        stop = start + count * self.config.page
        pair = tuple(x[:, :, start:stop] for x in pair)
        if self.seal is None:
            encoded = zip(self.codecs, pair, self.layouts, strict=True)
            self._take(tuple(at.arrange(code.encode(x)) for code, x, at in encoded))
            return
        batch, heads, _, _ = pair[0].shape
        shapes = tuple(at.shapes(heads) for at in self.layouts)
        places = self.pool.reserve(batch * count, shapes, pair[0].device)
        for code, x, at, side in zip(self.codecs, pair, self.layouts, self.pool.sides, strict=True):
            self.seal(code, x, at, side, places)
        self._hand_out(places, batch, count)

    def _take(self, sides: tuple[Stored, Stored]) -> None:
        """Add pages [B, n, G, ...]."""
        batch, count = sides[0]["words"].shape[:2]
        pages = ({name: x.flatten(0, 1) for name, x in side.items()} for side in sides)
        self._hand_out(self.pool.add(tuple(pages)), batch, count)

    def _hand_out(self, places: list[int], batch: int, count: int) -> None:
        """Add places of new pages to the table, row by row."""
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
        """Keep these rows of the batch, in this order; no page is copied."""
        new = [list(self.rows[i]) for i in rows.tolist()]
        for row in new:
            self.pool.hold(row)
        self.truncate(0)
        self.rows = new

    def fork(self) -> Paged:
        """A store of its own with the same pages."""
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
        """Return what is allocated."""
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
            tuple(at.arrange(state[name]) for name, at in zip(NAMES, self.layouts, strict=True))
        )
