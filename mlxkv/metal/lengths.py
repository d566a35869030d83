"""How much of its buffers each sequence has filled, and how the work on it is shared out.

A kernel reads the lengths from an array of sizes. They are known when it is launched (`Known`), or only
when it runs (`Later`): a step that was traced once is replayed for lengths that grow. How many threadgroups
share the work is settled before (`Division`), by what the buffers have room for, so that it is the same
either way and results are, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import mlx.core as mx

from mlxkv.metal.template import ints

Known = tuple[tuple[int, int, int], ...]  # of each sequence: records, sink tokens, live tokens
FEW, MORE = 8, 16  # pages in which room grows in steps of fixed shapes: first, and from 32 pages on
STEPS = 16  # in which lengths are counted between powers of two, where they are long
PARTS = 32  # in which the mean length of a batch is counted, of the longest


@dataclass(frozen=True, eq=False)
class Later:
    """Lengths that an array holds.

    numbers: [4 B] int32, of each sequence records, sink tokens, live tokens and its first record.
    division: for which kernels are launched. made: arrays for the kernels of this step, which its layers
    share.
    """

    numbers: mx.array
    division: Division
    made: dict = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Division:
    """What decides how many threadgroups share a kernel's work.

    records: of the longest sequence, rounded up. parts: the mean length, in `PARTS` of the longest.
    """

    records: int
    parts: int = PARTS

    def busy(self, merges: int) -> int:
        """`merges` with each sequence counted by its share of the longest, so that a long one among short
        ones is split as if it were nearly alone."""
        return max(1, round(merges * self.parts / PARTS))


def division(lengths: Known | Later, starts: tuple[int, ...] | None, each: int) -> Division:
    """The division for these lengths. starts: None where each sequence has a buffer of its own. each:
    records of a page."""
    if isinstance(lengths, Later):
        return lengths.division
    most = max(one[0] for one in lengths)
    if starts is None:
        return Division(each * grown(most // each))
    return shared(tuple(one[0] for one in lengths))


def grown(pages: int) -> int:
    """The capacity for so many pages and one more, in steps of fixed shapes: others of about this length
    have the same, and share the trace of a step. 6 capacities up to 64 pages: a trace takes the host as long
    as some ten steps, a page few bytes."""
    step = FEW if pages < 4 * FEW else MORE
    step = max(step, 1 << max(0, pages.bit_length() - STEPS.bit_length()))
    return -(-(pages + 1) // step) * step


@lru_cache(maxsize=256)
def shared(records: tuple[int, ...]) -> Division:
    """The division for sequences of so many records in one buffer."""
    most = max(records)
    if not most:
        return Division(0)
    step = max(STEPS, 1 << max(0, most.bit_length() - STEPS.bit_length()))
    return Division(-(-most // step) * step, -(-PARTS * sum(records) // (len(records) * most)))


@lru_cache(maxsize=64)
def own_starts(batch: int, heads: int, room: int) -> tuple[int, ...]:
    """The first record of each of a batch in [B, G, room, words]."""
    return tuple(i * heads * room for i in range(batch))


def behind(sizes: tuple[int, ...], lengths: Known | Later, starts: tuple[int, ...]) -> mx.array:
    """[n + 4 B] int32: `sizes`, then of each sequence its three lengths and its start."""
    if not isinstance(lengths, Later):
        return ints(
            *sizes, *(n for at, one in zip(starts, lengths, strict=True) for n in (*one, at))
        )
    if sizes not in lengths.made:
        lengths.made[sizes] = mx.concatenate([ints(*sizes), lengths.numbers])
    return lengths.made[sizes]


def five(lengths: Known | Later, starts: tuple[int, ...], more: int) -> mx.array:
    """[5 B + 4] int32: of each sequence its three lengths, its start, and `more`; four zeros behind."""
    if not isinstance(lengths, Later):
        rows = zip(starts, lengths, strict=True)
        return ints(*(n for at, one in rows for n in (*one, at, more)), *[0] * 4)
    if more not in lengths.made:
        rows = lengths.numbers.reshape(-1, 4)
        with_more = mx.concatenate([rows, mx.full((rows.shape[0], 1), more, mx.int32)], axis=1)
        lengths.made[more] = mx.concatenate([with_more.reshape(-1), mx.zeros(4, mx.int32)])
    return lengths.made[more]
