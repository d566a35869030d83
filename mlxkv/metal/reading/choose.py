"""Ranks chunks of tokens and chooses those that a step reads, on the device.

Plain-ops twin: `cache.reading.summary`.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxkv.formats.rules.reading import PARTS, count
from mlxkv.metal.launch import Factory, launch
from mlxkv.metal.lengths import Division, Known, Later, division, five, own_starts
from mlxkv.metal.template import Pair, exponents, ints

SIMDGROUPS = 8  # of a threadgroup that ranks, or chooses from few chunks
MANY = 2048  # chunks, above which a threadgroup that chooses has MOST simdgroups
MOST = 16
RUN = 4  # chunks that lanes rank one after the other


@dataclass(frozen=True)
class Chosen:
    """What attention reads: `chunks` [B, G, K] int32 in order, records of each, lengths that count these alone, and
    how the work is divided."""

    chunks: mx.array
    each: int
    lengths: Known | Later
    division: Division


def choose(
    q_pages: mx.array,
    q_window: mx.array,
    summaries: mx.array,
    share: int,
    each: int,
    sink: Pair | None,
    live: Pair,
    lengths: Known | Later,
    scale: float,
    new_tokens: int,
    make: Factory,
    starts: tuple[int, ...] | None = None,
    page: int = 0,
) -> Chosen:
    """Choose the chunks for a few new tokens.

    summaries: [B, G, chunks, W] uint32, or [1, G, chunks, W] for a batch with `starts`. share: in `PARTS`.
    each: records of a chunk. page: records of a page. The rest as for `attend.attend`.
    """
    batch, heads, rows, dims = q_window.shape
    room = summaries.shape[2]
    sink = sink or live  # never read: its length is 0
    windows = [x[0].shape[2] for x in (sink, live)]
    own = starts or own_starts(batch, heads, room * each)
    at = division(lengths, starts, page)
    longest = min(room, -(-at.records // each))  # of one sequence: a buffer may hold many
    side = 2 if max(dims, q_pages.shape[3]) > 128 else 4  # of a simdgroup, as in rank.metal
    beside = sum(-(-n // side) for n in windows)
    units, simdgroups = longest + beside, -(-longest // (RUN * side)) + beside
    sizes = five(lengths, own, 0)
    (logs,) = launch(
        "rank",
        [
            *(q_pages, q_window, summaries, sink[0], live[0]),
            ints(rows, room * each, *windows, new_tokens, heads, longest, units),
            *(sizes, exponents(scale)),
        ],
        {
            "T": q_window.dtype,
            "RK": q_pages.shape[3],
            "D": dims,
            "S": SIMDGROUPS,
            "RUN": RUN,
            "LIST": each,
        },
        (32 * SIMDGROUPS * -(-simdgroups // SIMDGROUPS), 1, batch * heads),
        (32 * SIMDGROUPS, 1, 1),
        [((batch, heads, rows, units), mx.float32)],
        make,
    )
    most, wide = max(1, count(longest, share)), MOST if longest > MANY else SIMDGROUPS
    chunks, _ = launch(
        "pick",
        [logs, ints(rows, heads, longest, units, share, most, 0, 0), sizes],
        {"S": wide, "LIST": each},
        (32 * wide, 1, batch * heads),
        (32 * wide, 1, 1),
        [((batch, heads, most), mx.int32), ((batch, heads, longest), mx.float32)],
        make,
    )
    shared = Division(most * each, at.parts)
    return Chosen(chunks, each, fewer(lengths, share, each, shared), shared)


def fewer(lengths: Known | Later, share: int, each: int, read: Division) -> Known | Later:
    """Lengths with the records that are read of so many. read: how the work on them is divided."""
    if not isinstance(lengths, Later):
        return tuple((count(n // each, share) * each, *rest) for n, *rest in lengths)
    if (name := ("read", share, each)) not in lengths.made:
        rows = lengths.numbers.reshape(-1, 4)
        chunks = rows[:, :1] // each
        counts = mx.maximum((chunks * share + PARTS // 2) // PARTS, 1)
        counts = mx.minimum(counts, chunks) * each
        numbers = mx.concatenate([counts, rows[:, 1:]], axis=1).reshape(-1)
        lengths.made[name] = Later(numbers, read)
    return lengths.made[name]
