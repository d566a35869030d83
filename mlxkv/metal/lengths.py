"""Lengths of the sequences in their buffers, and the division of a kernel's work into splits.

A kernel reads the lengths from an array of sizes. They are known at launch (`separate_lengths`, `batch_lengths`), or
only when it runs: a step traced once is replayed for growing lengths. The number of splits is decided before
(`Division`), by the capacity of the buffers, so that it and the results are the same either way.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain

import mlx.core as mx

from mlxkv.formats.sizes import STEPS, grown
from mlxkv.metal.template import ints

Rows = tuple[tuple[int, int, int], ...]  # per sequence: records, sink tokens, recent tokens
PARTS = 32  # resolution of mean length over longest length of a batch


@dataclass(frozen=True)
class Division:
    """Rounded lengths that determine how many threadgroups share a kernel's work.

    records: records of the longest sequence, rounded up. parts: mean length over longest length, in 1/`PARTS`.
    """

    records: int
    parts: int = PARTS

    def busy(self, merges: int) -> int:
        """Return `merges` with each sequence counted by its share of the longest, so that a long one among short
        ones is split as if it were nearly alone."""
        return max(1, round(merges * self.parts / PARTS))


@dataclass(frozen=True)
class Splits:
    """Splits of one head in decode attention.

    pages: splits of its records, `first` of which read the first of two runs. windows: splits of its sink and recent
    tokens.
    """

    pages: int
    windows: int
    first: int

    @property
    def total(self) -> int:
        """Number of splits to merge."""
        return self.pages + self.windows

    @staticmethod
    def of_runs(wanted: tuple[int, int], records: tuple[int, ...]) -> Splits:
        """Return the splits for consecutive runs of `records`. wanted: splits of records and of windows."""
        pages = first = max(len(records), wanted[0])
        if len(records) > 1:
            first = min(pages - 1, max(1, round(pages * records[0] / sum(records))))
        return Splits(pages, wanted[1], first)


@dataclass(frozen=True, eq=False)
class Lengths:
    """Lengths of a step's sequences, shared by its layers.

    numbers: [4 B], per sequence: records, sink tokens, recent tokens, first record; an int32 array if known on the
        device alone.
    division: determines the splits of kernels. arrays: cached arrays for the kernels of this step.
    """

    numbers: tuple[int, ...] | mx.array
    division: Division
    arrays: dict[Hashable, mx.array] = field(default_factory=dict, repr=False)

    @property
    def rows(self) -> list[tuple[int, int, int, int]]:
        """Return the four `numbers` of each sequence, if known on the host."""
        return list(zip(*[iter(self.numbers)] * 4, strict=True))

    def behind(self, sizes: tuple[int, ...]) -> mx.array:
        """Return `sizes`, then `numbers`: [n + 4 B] int32."""
        if sizes not in self.arrays:
            if isinstance(self.numbers, tuple):
                self.arrays[sizes] = ints(*sizes, *self.numbers)
            else:
                self.arrays[sizes] = mx.concatenate([ints(*sizes), self.numbers])
        return self.arrays[sizes]

    def with_more(self, more: int) -> mx.array:
        """Return `numbers` with `more` appended for each sequence, then four zeros: [5 B + 4] int32."""
        if more not in self.arrays:
            if isinstance(self.numbers, tuple):
                self.arrays[more] = ints(*(n for row in self.rows for n in (*row, more)), *[0] * 4)
            else:
                rows = self.numbers.reshape(-1, 4)
                rows = mx.concatenate([rows, mx.full((rows.shape[0], 1), more, mx.int32)], axis=1)
                self.arrays[more] = mx.concatenate([rows.reshape(-1), mx.zeros(4, mx.int32)])
        return self.arrays[more]


@lru_cache(maxsize=256)
def separate_lengths(rows: Rows, step: int, page: int) -> Lengths:
    """Return lengths of sequences with separate buffers, `step` records apart. page: records per page."""
    numbers = chain.from_iterable((*row, i * step) for i, row in enumerate(rows))
    return Lengths(tuple(numbers), Division(page * grown(max(rows)[0] // page)))


@lru_cache(maxsize=256)
def batch_lengths(rows: Rows, starts: tuple[int, ...]) -> Lengths:
    """Return lengths of sequences in one buffer. starts: first record of each."""
    numbers = chain.from_iterable((*row, at) for row, at in zip(rows, starts, strict=True))
    return Lengths(tuple(numbers), shared(tuple(records for records, _, _ in rows)))


@lru_cache(maxsize=256)
def shared(records: tuple[int, ...]) -> Division:
    """Return the division for sequences with these numbers of records in one buffer."""
    longest = max(records)
    if not longest:
        return Division(0)
    step = max(STEPS, 1 << max(0, longest.bit_length() - STEPS.bit_length()))
    return Division(
        -(-longest // step) * step, -(-PARTS * sum(records) // (len(records) * longest))
    )
