"""The holder of quantized pages: named arrays in which every sequence has its pages in one piece.

    [ pages of A | slack ][ pages of B | slack ][ gap ][ pages of C | slack ]

`starts` and `counts` are the block table, with one entry for each sequence, not for each page: the
kernels read the records of a sequence as one contiguous run (`metal/text/attend`), so pages are not
shared between sequences and no reference is counted. A table of single pages would cost a look-up
for every record in the inner loop of attention, and kernels stay as they are.

A cache of its own is one sequence with the arrays to itself, [B, G, rows, W], so that MLX reads
them without a copy. Caches that are decoded together are sequences of one holder, [1, G, rows, W].

A sequence grows into the slack behind it. Where that ends, all are laid out anew, with the same slack
for each, in all a sixteenth of what is stored, and what makes the capacity a round number. A
sequence that is removed leaves a gap that later ones may fill.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy, deepcopy
from itertools import chain
from typing import Any, Generic, TypeVar

import mlx.core as mx

from mlxkv.formats.layout import TOKENS
from mlxkv.formats.records import RecordLayout
from mlxkv.formats.sizes import GROWTH, WASTE, grown, page_room

Name = TypeVar("Name", bound=Hashable)
Named = dict[Name, mx.array]
Part = tuple[dict[Name, mx.array], int]  # arrays of exactly this number of pages; {} for none
Block = tuple[tuple[int, ...], mx.Dtype]  # shape and dtype of one page's array


class Pages(Generic[Name]):
    """Pages of sequences 0, 1, ..., initially one without pages.

    starts, counts: first page and number of pages per sequence. capacity: pages allocated.
    arrays: by name, [B, G, capacity * rows per page, W]. is_shared: whether they may contain several sequences.
    """

    def __init__(self):
        self.starts, self.counts, self.capacity = [0], [0], 0
        self.arrays: Named[Name] = {}
        self._blocks: dict[Name, Block] = {}
        self.is_shared = False

    @staticmethod
    def of_many(layout: RecordLayout, page: int, heads: int) -> Pages[str]:
        """Return an empty holder of records, `page` tokens a page, for several sequences."""
        out: Pages[str] = Pages()
        out.starts, out.counts, out.is_shared = [], [], True
        out._blocks["records"] = (1, heads, page // TOKENS, layout.words), mx.uint32
        if layout.header_words:
            out._blocks["headers"] = (1, heads, 1, layout.header_words), mx.uint32
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> Pages[Name]:
        pages = copy(self)
        pages.starts, pages.counts = list(self.starts), list(self.counts)
        pages.arrays = deepcopy(self.arrays, memo)
        return pages

    @property
    def count(self) -> int:
        """Pages of all sequences."""
        return sum(self.counts)

    def read(self, start: int = 0, stop: int | None = None, i: int = 0) -> Named[Name]:
        """Return the arrays of pages start .. stop - 1 (default: all) of sequence i; {} for none."""
        first = self.starts[i]
        start, stop = first + start, first + (self.counts[i] if stop is None else stop)
        if start == stop:
            return {}
        if start == 0 and stop == self.capacity:
            return dict(self.arrays)
        out: Named[Name] = {}
        for name, x in self.arrays.items():
            rows = self._blocks[name][0][2]
            out[name] = x[:, :, start * rows : stop * rows]
        return out

    def append(self, encoded: Named[Name], count: int, i: int = 0) -> None:
        """Add `count` pages to a sequence, as `Codec.encode` or a kernel returned them."""
        if not self._blocks:
            self._describe(encoded, count)
        at, end = self.starts[i] + self.counts[i], self.capacity
        for start in self.starts:
            if at <= start < end and start != self.starts[i]:
                end = start
        if at + count <= end:
            self._write(at, encoded, count)
        else:
            slack = page_room(count, self.count, len(self.counts))
            self._lay_out(self._parts(), slack, i, encoded, count)
        self.counts[i] += count

    def reserve_slack(self) -> None:
        """Reserve the slack of steps of fixed shapes for the only sequence."""
        if self.capacity != (capacity := grown(self.counts[0])):
            self._lay_out(self._parts(), capacity - self.counts[0])

    def truncate(self, count: int) -> None:
        """Keep the first `count` pages of the only sequence; free slack beyond what growing reserves."""
        arrays = self.read(0, count) if self.capacity - count > count // GROWTH else None
        self.counts[0] = count
        if arrays is not None:
            self.restore(arrays, count)

    def restore(self, arrays: Named[Name], count: int) -> None:
        """Replace the contents by one sequence of exactly `count` pages."""
        for name, x in arrays.items():
            if x.shape[2] % count:
                raise ValueError(f"{x.shape[2]} rows of {name} in {count} pages")
        self._describe(arrays, count)
        # New handles: writing into an mx.array in place changes it for every holder.
        self.arrays = {name: mx.contiguous(x) for name, x in arrays.items()}
        self.starts, self.counts, self.capacity = [0], [count], count

    def join(self, parts: Sequence[Part[Name]]) -> None:
        """Add sequences, in gaps or by a new layout."""
        earlier = self._parts()
        places: list[int] = []
        for _, count in parts:
            self.counts.append(count)
            if (place := self._gap(count)) is None:
                return self._lay_out([*earlier, *parts], self._slack([*earlier, *parts]))
            places.append(place)
            self.starts.append(place)
        for at, (stored, count) in zip(places, parts, strict=True):
            if count:
                self._write(at, stored, count)
        return None

    def select(self, indices: Sequence[int]) -> None:
        """Keep these sequences, in this order."""
        self.starts = [self.starts[i] for i in indices]
        self.counts = [self.counts[i] for i in indices]
        parts = self._parts()
        slack = self._slack(parts)
        needed_pages = self.count + len(parts) * slack
        if (
            self.capacity > grown(needed_pages - 1)
            and (self.capacity - needed_pages) * WASTE > self.capacity
        ):
            self._lay_out(parts, slack)

    def _describe(self, arrays: Named[Name], count: int) -> None:
        self._blocks = {
            name: ((*x.shape[:2], x.shape[2] // count, x.shape[3]), x.dtype)
            for name, x in arrays.items()
        }

    def _parts(self) -> list[Part[Name]]:
        return [(self.read(i=i), count) for i, count in enumerate(self.counts)]

    @staticmethod
    def _slack(parts: Sequence[Part[Any]]) -> int:
        """Return the slack of each of several sequences."""
        return max(1, sum(count for _, count in parts) // (GROWTH * max(1, len(parts))))

    def _slacks(self, at_least: int) -> list[int]:
        """Return the slack of each sequence, `at_least` or more, such that capacities are round for several."""
        count, slack, extra = len(self.counts), at_least, 0
        if self.is_shared:
            filled = sum(self.counts) + count * at_least
            spare, extra = divmod(grown(filled - 1) - filled, count)
            slack += spare
        return [slack + (i < extra) for i in range(count)]

    def _gap(self, count: int) -> int | None:
        """Return where `count` pages fit with slack after them and after the preceding sequence, or None."""
        runs = ((at, at + n) for at, n in zip(self.starts, self.counts, strict=False))
        slack, free = max(1, self.count // (GROWTH * len(self.counts))), 0
        for start, stop in chain(sorted(runs), [(self.capacity, self.capacity)]):
            at = free + slack if free else 0
            if at + count + slack <= start:
                return at
            free = stop
        return None

    def _write(self, at: int, stored: Named[Name], count: int) -> None:
        for name, x in self.arrays.items():
            rows = self._blocks[name][0][2]
            x[:, :, at * rows : (at + count) * rows] = stored[name]

    def _lay_out(
        self,
        parts: Sequence[Part[Name]],
        slack: int,
        to: int | None = None,
        added: Named[Name] | None = None,
        count: int = 0,
    ) -> None:
        """Allocate new arrays with at least `slack` free pages after each of `parts`.

        The slack of sequence `to` begins with `count` pages `added`. Only free slack is filled with zeros.
        """
        self.counts, self.capacity = [n for _, n in parts], 0
        self.starts = list[int]()
        slacks = self._slacks(slack)
        for n, slack in zip(self.counts, slacks, strict=True):
            self.starts.append(self.capacity)
            self.capacity += n + slack
        for name, ((batch, heads, rows, width), dtype) in self._blocks.items():
            pieces: list[mx.array] = []
            for i, ((stored, _), free) in enumerate(zip(parts, slacks, strict=True)):
                if stored:
                    pieces.append(stored[name])
                if i == to and added is not None:
                    pieces.append(added[name])
                    free -= count
                if free:
                    pieces.append(mx.zeros((batch, heads, free * rows, width), dtype))
            self.arrays[name] = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)
