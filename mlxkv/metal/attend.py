"""Reading page records: unseal decodes them, attend computes attention over them. Plain-ops twins:
`codec.records.to_codes`, and `cache.attention` over `CodePages`.

`make` is the factory that builds the kernels (`launch`); tests pass the emulator's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from mlxkv.formats.records import BLOCK, TOKENS, RecordLayout
from mlxkv.metal import gpu
from mlxkv.metal.launch import Factory, launch
from mlxkv.metal.lengths import Known, Later, division, five, own_starts
from mlxkv.metal.template import (
    Pair,
    cap_bits,
    exponents,
    fill_table,
    ints,
    nothing,
    sides_template,
)

SIMDGROUPS = 4  # of a threadgroup
SPLIT_RECORDS = 16  # records per split at least, so that merging stays small
FEW_RECORDS = 2 * SIMDGROUPS  # the same where the number of cores decides
# Threadgroups wanted of the six, of 4 simdgroups with 128 registers, that an Apple core holds.
PER_CORE = 4
MAX_SPLITS = 128
MOST_NEW = 8  # tokens that `attend` takes at once: more are a prefill
# Query rows of a threadgroup at most: of each a lane holds an eighth of the outputs, and an Apple GPU has 128
# registers. By the largest of its dims; more of them leave one row. NVIDIA has 255 registers.
TILE_ROWS, TILE_DIMS, TILE_ROWS_CUDA = 2, 128, 4


def unseal(
    buffer: mx.array,
    count: int,
    layout: RecordLayout,
    dtype: mx.Dtype,
    make: Factory,
    sink: Pair | None = None,
    live: Pair | None = None,
    headers: mx.array | None = None,
) -> Pair:
    """(keys, values): sink, then the first `count` records of [B, G, capacity, words], then live, in
    one dispatch.

    sink, live: (keys, values), [B, G, tokens, R] in `dtype`, or None. headers: [B, G, pages, header
    words], for formats that have them. Returns [B, G, all tokens, R] each, in `dtype`.
    """
    batch, heads = buffer.shape[:2]
    tokens = count * TOKENS + sum(x[0].shape[2] for x in (sink, live) if x is not None)
    rest = buffer, count, layout, dtype, make, sink, live, headers
    keys, all_ = (
        batch * heads * tokens * n
        for n in (layout.keys.dims, layout.keys.dims + layout.values.dims)
    )
    # Values would lie where no wide store goes, or the array would be longer than MLX allows.
    if keys % 8 or all_ >= 1 << 31:
        return _unseal(*rest, 0, 1)[0], _unseal(*rest, 1, 1)[0]
    return tuple(_unseal(*rest, 0, 2))


def unseal_side(
    buffer: mx.array,
    count: int,
    layout: RecordLayout,
    keys: bool,
    dtype: mx.Dtype,
    make: Factory,
    headers: mx.array | None = None,
) -> mx.array:
    """As `unseal`, one side without windows: [B, G, 16 count, R]."""
    return _unseal(buffer, count, layout, dtype, make, None, None, headers, int(not keys), 1)[0]


def _unseal(
    buffer: mx.array,
    count: int,
    layout: RecordLayout,
    dtype: mx.Dtype,
    make: Factory,
    sink: Pair | None,
    live: Pair | None,
    headers: mx.array | None,
    first: int,
    sides: int,
) -> list[mx.array]:
    """Unseal `sides` sides from side `first` on, 0: keys, 1: values."""
    batch, heads, capacity, words = buffer.shape
    n_sink, n_live = (0 if x is None else x[0].shape[2] for x in (sink, live))
    tokens = n_sink + count * TOKENS + n_live
    units = batch * heads * (count + sum(-(-n // TOKENS) for n in (n_sink, n_live)))
    empty = nothing(dtype), nothing(dtype)
    ranks = (layout.keys.dims, layout.values.dims)[first : first + sides]
    sizes = [batch * heads * tokens * rank for rank in ranks]
    filled = bool(layout.keys.widths)
    (out,) = launch(
        "unseal",
        [
            *(buffer, _shared(layout, headers)),
            *(*(sink or empty), *(live or empty)),
            ints(count, capacity, batch * heads, n_sink, n_live, first, 0, 0),
        ],
        {
            "T": dtype,
            **({} if filled else _unseal_template(layout)),
            **sides_template(layout),
        },
        (32 * SIMDGROUPS * -(-units // SIMDGROUPS), sides, 1),
        (32 * SIMDGROUPS, 1, 1),
        [((sum(sizes),), dtype)],
        make,
    )
    parts = [out] if sides == 1 else mx.split(out, [sizes[0]])
    return [x.reshape(batch, heads, tokens, rank) for x, rank in zip(parts, ranks, strict=True)]


def _shared(layout: RecordLayout, headers: mx.array | None) -> mx.array:
    """Return what kernels read as headers: those of the pages, or the table of a layer's blocks, or nothing."""
    if layout.keys.widths:
        return fill_table(layout)
    return nothing(mx.uint32) if headers is None else headers


@lru_cache(maxsize=256)
def _unseal_template(layout: RecordLayout) -> dict[str, object]:
    return {
        "RECORD": layout.words,
        "PAGE": layout.page,
        "HEADER": layout.header_words,
        "SIDE_K": layout.keys.words,
        "HEADER_K": layout.keys.header_words,
        "DIMS_K": layout.keys.dims,
        "DIMS_V": layout.values.dims,
    }


@lru_cache(maxsize=256)
def _attend_template(layout: RecordLayout, dims: int) -> dict[str, object]:
    filled = bool(layout.keys.widths)  # then one text serves all layers
    return {
        "D": dims,
        "RK": dims if filled else layout.keys.dims,
        "RV": dims if filled else layout.values.dims,
        "RECORD": 0 if filled else layout.words,
        "PAGE": layout.page,
        "HEADER": layout.header_words,
        **sides_template(layout),
    }


@dataclass(frozen=True)
class Run:
    """A second run of pages, behind the first, with a stored domain of its own. records: how many. The
    rest as for `attend`."""

    q_pages: mx.array
    buffer: mx.array
    records: int
    up: mx.array | None = None
    headers: mx.array | None = None


def attend(
    q_pages: mx.array,
    q_window: mx.array,
    buffer: mx.array,
    layout: RecordLayout,
    sink: Pair | None,
    live: Pair,
    lengths: Known | Later,
    scale: float,
    new_tokens: int,
    make: Factory,
    up: mx.array | None = None,
    window: int = 0,
    sink_logits: mx.array | None = None,
    headers: mx.array | None = None,
    second: Run | None = None,
    starts: tuple[int, ...] | None = None,
    page: int = 0,
    softcap: float | None = None,
) -> mx.array:
    """Attention of a few new tokens over records and windows.

    q_pages: [B, G, N, RK] float32 in the stored domain; q_window: [B, G, N, D]; row i of a kv head
        belongs to new token i % new_tokens, the last tokens of live.
    buffer: [B, G, capacity, words]. headers: [B, G, pages, header words], for formats that have
        them. sink, live: (keys, values), [B, G, tokens, D].
    lengths: for each of the batch (records, sink tokens, live tokens), or `Later`, with the starts.
    starts: where all of a batch share buffer [1, G, capacity, words] and headers, the first record
        of each, the first of a page.
    up: [RV, D], [G, RV, D] or [B, G, RV, D] float32, from the stored domain of the values to the
        model's, or None. second: more records, behind these, in the same pass.
    page: tokens that are sealed together, at least the layout's.
    window: sliding window in tokens, 0 for none. sink_logits: [H] logits of attention sinks. softcap:
        scores are bent to stay below it.
    Returns [B, G, N, D] in the dtype of q_window.
    """
    batch, heads, rows, dims = q_window.shape
    capacity, filled = buffer.shape[2], bool(layout.keys.widths)
    window_units = sum(-(-x[0].shape[2] // TOKENS) for x in (sink, live) if x is not None)
    sink = sink or live  # never read: its length is 0
    tile = rows_of_tile(max(dims, layout.keys.dims, layout.values.dims), rows, make)
    tiles = -(-rows // tile)
    shared = division(lengths, starts, (page or layout.page) // TOKENS)
    most = shared.records
    starts = starts or own_starts(batch, heads, capacity)
    more, runs = (second.records, 2) if second else (0, 1)
    page_splits, window_splits = splits_for(
        most + more, window_units, batch * heads * tiles, gpu.cores(make)
    )
    page_splits = max(runs, page_splits)
    first = page_splits
    if second:
        first = min(page_splits - 1, max(1, round(page_splits * most / (most + more))))
        q_pages = mx.stack([q_pages, second.q_pages], axis=2)
        up = _both_up(up, second.up, batch, heads)
    after = second or Run(q_pages, nothing(mx.uint32), 0)
    splits = page_splits + window_splits
    stored = dims if filled else layout.values.dims
    width = BLOCK * max(-(-stored // BLOCK), -(-dims // BLOCK))
    tokens = (sink[0].shape[2], live[0].shape[2])
    numbers = exponents(scale)
    out, stats = launch(
        "attend",
        [
            q_pages,
            q_window,
            buffer,
            _shared(layout, headers),
            *sink,
            *live,
            ints(
                *(rows, page_splits, capacity, *tokens, new_tokens, window, heads),
                *(first, after.buffer.shape[2] if second else 0, runs),
            ),
            five(lengths, starts, more),
            numbers,
            after.buffer,
            nothing(mx.uint32) if after.headers is None else after.headers,
        ],
        {
            "T": q_window.dtype,
            "QT": tile,
            "S": SIMDGROUPS,
            "CAP": cap_bits(softcap),
            **_attend_template(layout, dims),
        },
        (32 * SIMDGROUPS * tiles, splits, batch * heads),
        (32 * SIMDGROUPS, 1, 1),
        [
            ((batch * heads * rows, splits, width), mx.float32),
            ((batch * heads * rows, splits, 2), mx.float32),
        ],
        make,
    )
    threads = 32 * min(8, width // BLOCK)
    (merged,) = launch(
        "merge",
        [
            out,
            stats,
            nothing() if up is None else up,
            nothing() if sink_logits is None else sink_logits.astype(mx.float32),
            numbers,
            ints(
                splits,
                page_splits,
                rows,
                heads,
                new_tokens,
                1 if up is None else up.size // (runs * layout.values.dims * dims),
                first,
                runs,
                *((layout.values.dims, *[0] * 7) if filled else ()),
            ),
        ],
        {
            "T": q_window.dtype,
            "WIDTH": width,
            "RV": 0 if filled else layout.values.dims,
            "D": dims,
            "HAS_UP": int(up is not None),
            "HAS_SINKS": int(sink_logits is not None),
        },
        (threads * batch * heads * rows, 1, 1),
        (threads, 1, 1),
        [((batch, heads, rows, dims), q_window.dtype)],
        make,
    )
    return merged


def rows_of_tile(dims: int, rows: int, make: Factory) -> int:
    """Query rows of a threadgroup of `attend`, 1, 2 or 4, so that few kernels are built. dims: the largest
    of D and the stored dims."""
    most = TILE_ROWS if dims <= TILE_DIMS else 1
    if make is mx.fast.cuda_kernel:
        most = TILE_ROWS_CUDA
    return next(n for n in (1, 2, 4) if rows <= n or n == most)


def splits_for(records: int, windows: int, others: int, cores: int | None) -> tuple[int, int]:
    """Return how many threadgroups share the records of a head, and how many its windows.

    windows: units of 16 tokens. others: heads times tiles of rows. cores: of the GPU; None: enough for
    splits of `SPLIT_RECORDS`.
    """
    if cores is None:
        return min(MAX_SPLITS, max(1, -(-records // SPLIT_RECORDS))), 1
    most = MAX_SPLITS // 2  # of each, so that the merge can take both
    pages = max(1, min(most, round(PER_CORE * cores / others), -(-records // FEW_RECORDS)))
    # Windows get splits of their own, each with at least as many units as a split of the records.
    each = max(SIMDGROUPS, -(-records // pages))
    return pages, max(1, min(most, -(-windows // each)))


def _both_up(
    first: mx.array | None, second: mx.array | None, batch: int, heads: int
) -> mx.array | None:
    """[2, B, G, RV, D] of two runs."""
    if first is None or second is None:
        return None
    shape = (batch, heads, *first.shape[-2:])
    return mx.stack([mx.broadcast_to(up, shape) for up in (first, second)])
