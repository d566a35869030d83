"""Where quantized pages are: `Codes` for plain ops, `Paged` for Triton. One cache, one store.

A store grows and is truncated by whole pages, hands out snapshots that attention reads (`view`), and
restores what any store of either track saved.
"""

from __future__ import annotations

import torch

from cuda_track.cache.view import CodePages, Pair
from cuda_track.codec.codec import Codec, Stored, both, codec
from cuda_track.codec.maps import LayerMaps
from cuda_track.codec.records import as_codes
from cuda_track.kernels import launch, layout
from cuda_track.kernels.pool import Pool, PoolPages
from cuda_track.kernels.record import Record
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.records import NAMES


def codecs_of(
    config: CacheConfig, dims: tuple[int, int], maps: LayerMaps | None, device: torch.device
) -> tuple[Codec, Codec]:
    """Return the codecs of keys and of values, for heads of these dims."""
    maps_here = maps and maps.to(device)

    def made(name: str, side: Side, dim: int) -> Codec:
        if side.calibrated and maps_here is not None:
            return Codec(side, dim, config.page, getattr(maps_here, name), device)
        return codec(side, dim, config.page, device)

    return made(NAMES[0], config.keys, dims[0]), made(NAMES[1], config.values, dims[1])


class Codes:
    """Quantized pages for plain ops: the tensors of both sides, by (side, name), the rows of all pages on axis 2."""

    def __init__(self, config: CacheConfig, codecs: tuple[Codec, Codec]):
        self.config, self.codecs = config, codecs
        self.count = 0
        self._arrays: dict[tuple[str, str], torch.Tensor] = {}

    def append(self, pair: Pair, count: int, start: int = 0) -> None:
        """Encode `count` pages of keys and values [B, G, T, D], from token `start` on."""
        stop = start + count * self.config.page
        sides = zip(NAMES, self.codecs, pair, strict=True)
        new = _flat({name: code.encode(x[:, :, start:stop]) for name, code, x in sides})
        if self.count:
            new = {name: torch.cat([self._arrays[name], x], 2) for name, x in new.items()}
        self._arrays, self.count = new, self.count + count

    def _sides(self, start: int, stop: int) -> dict[str, Stored]:
        """Return the tensors of pages start .. stop - 1."""
        out: dict[str, Stored] = {name: {} for name in NAMES}
        for (side, name), x in self._arrays.items():
            rows = x.shape[2] // self.count
            out[side][name] = x[:, :, start * rows : stop * rows]
        return out

    def read(self, start: int, stop: int) -> CodePages:
        """Return a snapshot of pages start .. stop - 1."""
        keys, values = self._sides(start, stop).values()
        return CodePages(self.codecs, (keys, values), (stop - start) * self.config.page)

    def _hold(self, sides: dict[str, Stored], count: int) -> None:
        """Hold copies of the tensors of exactly `count` pages."""
        arrays = _flat(sides)
        for name, x in arrays.items():
            if x.shape[2] % count:
                raise ValueError(f"{x.shape[2]} rows of {name} in {count} pages")
        self._arrays, self.count = {name: x.clone() for name, x in arrays.items()}, count

    def truncate(self, count: int) -> None:
        """Keep the first `count` pages."""
        if not count:
            self._arrays, self.count = {}, 0
        elif count < self.count:
            self._hold(self._sides(0, count), count)

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        self._arrays = {name: x[rows] for name, x in self._arrays.items()}

    def arrays(self) -> list[torch.Tensor]:
        """Return what is allocated."""
        return list(self._arrays.values())

    @property
    def state(self) -> dict[str, Stored]:
        return self._sides(0, self.count)

    def restore(self, state: dict, count: int) -> None:
        """Take over the `count` pages of a state of any store."""
        self._hold(as_codes(state, self.codecs), count)


def _flat(sides: dict[str, Stored]) -> dict[tuple[str, str], torch.Tensor]:
    return {(side, name): x for side in NAMES for name, x in sides[side].items()}


class Paged:
    """Quantized pages for Triton: a block table into a pool that copies of the cache share."""

    def __init__(self, config: CacheConfig, codecs: tuple[Codec, Codec], pool: Pool | None = None):
        self.config, self.codecs, self.pool = config, codecs, pool or Pool()
        self.layouts = layout.layouts(codecs)
        self.record = Record(self.layouts)
        self.rows: list[list[int]] = []  # places of the pages of each row of the batch
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def count(self) -> int:
        return max(map(len, self.rows), default=0)

    def append(self, pair: Pair, count: int, start: int = 0) -> None:
        """Encode `count` pages of keys and values [B, G, T, D], from token `start` on."""
        stop = start + count * self.config.page
        pair = both(lambda x: x[:, :, start:stop], pair)
        batch, heads, _, _ = pair[0].shape
        places = self.pool.reserve(batch * count, self.record, heads, pair[0].device)
        for code, x, at, side in zip(self.codecs, pair, self.layouts, self.pool.sides, strict=True):
            launch.quantize_pages(code, x, at, side, places)
        self._hand_out(places, batch, count)

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
        """Return a snapshot of pages start .. stop - 1."""
        if self._table is None:
            longest = self.count
            rows = [row + row[-1:] * (longest - len(row)) for row in self.rows]
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

    def __deepcopy__(self, memo) -> Paged:
        """Return a store with the same pages."""
        copied = Paged(self.config, self.codecs, self.pool)
        copied.rows = [list(row) for row in self.rows]
        for row in copied.rows:
            self.pool.hold(row)
        return copied

    def __del__(self):
        for row in self.rows:
            self.pool.release(row)

    def arrays(self) -> list[torch.Tensor]:
        """Return what is allocated."""
        return [self.pool.bytes] if self.pool.holders else []

    @property
    def state(self) -> dict[str, Stored]:
        return dict(zip(NAMES, self.read(0, self.count).stored, strict=True))

    def restore(self, state: dict, count: int) -> None:
        """Take over the `count` pages of a state of any store."""
        state = as_codes(state, self.codecs)
        self.truncate(0)
        self.rows = []
        keys, values = self.layouts
        sides = keys.arrange(state[NAMES[0]]), values.arrange(state[NAMES[1]])  # [B, n, G, ...]
        batch, count = sides[0]["words"].shape[:2]
        flat = both(lambda side: {name: x.flatten(0, 1) for name, x in side.items()}, sides)
        self._hand_out(self.pool.add(flat, self.record), batch, count)
