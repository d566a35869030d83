"""`PagePool`: the sealed pages of several sequences side by side, so that one kernel reads them all.

    [ pages of A | room ][ pages of B | room ][ gap ][ pages of C | room ]

A sequence has its pages in one piece and grows into what is free behind them. Sequences of a batch
grow alike: when one meets the next, all are laid out anew, with the same room for each, in all a
sixteenth of what is stored, a page at least. Who leaves leaves a gap for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import mlx.core as mx

from mlxkv.codec import Stored
from mlxkv.kernels import RecordLayout
from mlxkv.pages import GROWTH
from mlxkv.records import TOKENS

WASTE = 16  # at most one page of so many is a gap
Part = tuple[Stored, int]  # the arrays of exactly so many pages; {} for none


def most(pages: int) -> int:
    """Pages that a sequence of so many takes at most, with its room and its share of gaps."""
    return -(-(pages * (GROWTH + 1) + GROWTH) * WASTE // (GROWTH * (WASTE - 1)))


class PagePool:
    """Pages of `page` tokens, of sequences that are numbered from 0.

    starts, counts: the first page and the pages of each. arrays: "records" [1, G, records, words],
    and "headers" [1, G, pages, header words] for formats that have them.
    """

    def __init__(self, layout: RecordLayout, page: int, heads: int):
        self.heads, self.each = heads, page // TOKENS  # records of a page
        self.widths = {"records": (self.each, layout.words)}
        if layout.header_words:
            self.widths["headers"] = (1, layout.header_words)
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.capacity = 0
        self.arrays: Stored = {}

    @property
    def _room(self) -> int:
        """Free pages that each is given behind its own."""
        return max(1, sum(self.counts) // (GROWTH * max(1, len(self.counts))))

    def read(self, i: int) -> Stored:
        """The arrays of a sequence, {} if it has no pages."""
        first, last = self.starts[i], self.starts[i] + self.counts[i]
        if first == last:
            return {}
        return {name: x[:, :, first * n : last * n] for name, n, x in self._named()}

    def append(self, i: int, page: Stored) -> None:
        """Add one page to a sequence."""
        at = self.starts[i] + self.counts[i]
        others = self.starts[:i] + self.starts[i + 1 :]
        if at == self.capacity or at in others:
            self._lay_out(self._parts())
            at = self.starts[i] + self.counts[i]
        self._write(at, page, 1)
        self.counts[i] += 1

    def join(self, parts: Sequence[Part]) -> None:
        """More sequences: into gaps, or all are laid out anew."""
        before, places = self._parts(), []
        for _, count in parts:
            self.counts.append(count)
            places.append(self._gap(count))
            if places[-1] is None:
                return self._lay_out([*before, *parts])
            self.starts.append(places[-1])
        for at, (stored, count) in zip(places, parts, strict=True):
            if count:
                self._write(at, stored, count)
        return None

    def keep(self, indices: Sequence[int]) -> None:
        """Only these sequences, in this order."""
        self.starts = [self.starts[i] for i in indices]
        self.counts = [self.counts[i] for i in indices]
        wanted = sum(self.counts) + len(self.counts) * self._room
        if (self.capacity - wanted) * WASTE > self.capacity:
            self._lay_out(self._parts())

    def _gap(self, count: int) -> int | None:
        """Where `count` pages fit, with room behind them and behind the sequence before."""
        taken = ((at, at + n) for at, n in zip(self.starts, self.counts, strict=False))
        room, free = self._room, 0
        for start, stop in chain(sorted(taken), [(self.capacity, self.capacity)]):
            at = free + room if free else 0
            if at + count + room <= start:
                return at
            free = stop
        return None

    def _parts(self) -> list[Part]:
        return [(self.read(i), count) for i, count in enumerate(self.counts)]

    def _named(self):
        """(name, rows of a page, array) of each array."""
        return ((name, self.widths[name][0], x) for name, x in self.arrays.items())

    def _write(self, at: int, stored: Stored, count: int) -> None:
        for name, rows, x in self._named():
            x[:, :, at * rows : (at + count) * rows] = stored[name]

    def _lay_out(self, parts: Sequence[Part]) -> None:
        """New arrays with these parts and room behind each."""
        self.counts = [count for _, count in parts]
        self.starts, self.capacity, room = [], 0, self._room
        for count in self.counts:
            self.starts.append(self.capacity)
            self.capacity += count + room
        arrays = {}
        for name, (rows, words) in self.widths.items():
            free = mx.zeros((1, self.heads, room * rows, words), mx.uint32)
            pieces = ((stored[name], free) if stored else (free,) for stored, _ in parts)
            arrays[name] = mx.concatenate(list(chain.from_iterable(pieces)), axis=2)
        self.arrays = arrays
