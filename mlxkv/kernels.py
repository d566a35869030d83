"""The kernels with their shapes: seal, unseal, attend. Plain-ops twins: records.py, attention.py.

`make` is the factory that builds them (metal/launch.py); tests hand in the emulator's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import e, log2

import mlx.core as mx
import numpy as np

from mlxkv import gpu, levels, records
from mlxkv.metal.launch import Factory, launch
from mlxkv.quantizers import affine
from mlxkv.records import BLOCK, TOKENS, SideLayout
from mlxkv.transform import Transform

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
TILES = 2048  # pairs of floats in the threadgroup memory of a seal: 16 KiB, or one tile
# Threadgroups that a multiprocessor of an NVIDIA GPU is to hold, by pairs of a tile: enough simdgroups
# to wait for memory, with few registers spilled (counted by the compiler, not tuned by timing).
RESIDENT = {512: 8, 1024: 10, 2048: 12}
MAX_RANK = 64  # of a limit that the seal kernel finds: the longest list of metal/select.h
FAST_DIMS = (64, 128, 256, 512)
FAST_KINDS = {"hadamard": 1, "srft": 2}
DENSE, DENSE_DIMS, DENSE_TOKENS = 3, (64, 96, 128, 192, 256), 512
MAX_TERMS = 8  # of the polynomial through the levels of a codebook: 4 bits
LOG2E = log2(e)
Pair = tuple[mx.array, mx.array]


@dataclass(frozen=True)
class RecordLayout:
    """Keys and values of a record."""

    keys: SideLayout
    values: SideLayout

    @property
    def words(self) -> int:
        return self.keys.words + self.values.words

    @property
    def header_words(self) -> int:
        return self.keys.header_words + self.values.header_words

    @property
    def sealed_by_kernel(self) -> bool:
        return self.keys.sealed_by_kernel and self.values.sealed_by_kernel

    @property
    def page(self) -> int:
        """Tokens that share a header; 16, a record, where there is none."""
        return max(TOKENS, self.keys.page, self.values.page)


def side_template(at: SideLayout, suffix: str = "") -> dict[str, object]:
    """The template values that describe a side; C: coefficients for `kv_level`."""
    bits = at.bits - at.signs
    terms = levels.polynomial(at.dims, bits) / 2**bits if at.codebook else ()
    return {
        f"BITS{suffix}": at.bits,
        f"GROUP{suffix}": at.group,
        f"SYMMETRIC{suffix}": int(at.symmetric),
        f"CHANNEL{suffix}": int(at.channel),
        f"OUTER{suffix}": int(at.outer),
        f"PER_TOKEN{suffix}": int(not (at.channel or at.tree or at.bits == 16)),
        f"PAIRS{suffix}": int(at.pairs),
        f"CODEBOOK{suffix}": int(at.codebook),
        f"SIGNS{suffix}": int(at.signs),
        f"TREE{suffix}": at.tree,
        f"BOOKS{suffix}": at.books,
        f"C{suffix}": _constants(terms),
    }


def sealing_template(at: SideLayout, suffix: str) -> dict[str, object]:
    """What sealing has to know besides; B: the boundaries above 0 between levels."""
    table = levels.sphere(at.dims, at.bits) if at.codebook else np.zeros(2)
    middles = (table[1:] + table[:-1])[len(table) // 2 :] / 2
    return {f"CORRECTED{suffix}": int(at.corrected), f"B{suffix}": _constants(middles)}


def _constants(values: Sequence[float]) -> tuple[int, ...]:
    """Float32 values as the integers of their bits; zeros fill up to `MAX_TERMS`."""
    bits = np.zeros(MAX_TERMS, np.float32)
    bits[: len(values)] = values
    return tuple(int(x) for x in bits.view(np.int32))


def seal(
    pair: Pair,
    layout: RecordLayout,
    make: Factory,
    transforms: tuple[Transform | None, Transform | None] = (None, None),
    start: int = 0,
    tokens: int | None = None,
    ranks: tuple[int, int] = (1, 1),
) -> mx.array:
    """(keys, values), each [B, G, T, D] -> records [B, G, tokens / 16, words], in one dispatch.
    The two may differ in D, dtype, format and transform.

    Encodes `tokens` tokens from `start` on, all by default, and reads nothing else: hand over whole
        buffers, since MLX copies slices. tokens is a multiple of 16.
    transforms: of keys and values. One that the kernel cannot apply (`seal_kind`) is an MLX product
        before the dispatch.
    ranks: of keys and values, `Affine.clip_rank`. Beyond `MAX_RANK` MLX clips before the dispatch.
    """
    batch, heads, length, _ = pair[0].shape
    tokens = length - start if tokens is None else tokens
    count = tokens // TOKENS
    inputs, tables, places, matrices, template, tile = [], [], [], [], {}, 16
    sides = zip("KV", pair, (layout.keys, layout.values), transforms, ranks, strict=True)
    for name, x, at, transform, rank in sides:
        kind, first = seal_kind(transform, x.shape[3], tokens), start
        if kind is None or rank > MAX_RANK:
            x, kind, first = x[:, :, start : start + tokens], 0, 0
            x = x if transform is None else transform.store(x)
            if rank > MAX_RANK:
                x, rank = affine.clip_rows(x.astype(mx.float32), rank), 1
        elif x.dtype not in (mx.float32, mx.float16, mx.bfloat16):
            x = x.astype(mx.float32)
        inputs.append(x)
        table = transform.down if kind == DENSE else transform.table if kind else nothing()
        tables.append(table)
        matrices.append(max(1, table.size // x.shape[3] ** 2))
        places += [first, x.shape[2]]
        template |= {f"T_{name}": x.dtype, f"D_{name}": at.dims, f"KIND_{name}": kind}
        template |= {f"RANK_{name}": rank}
        template |= side_template(at, f"_{name}") | sealing_template(at, f"_{name}")
        tile = max(tile, TOKENS * at.dims // 2 if kind else 0)
    groups = max(1, min(SIMDGROUPS, TILES // tile))
    (out,) = launch(
        "seal",
        [*inputs, *tables, ints(count, batch * heads, *places, *matrices)],
        {**template, "S": groups, "TILE": tile},
        (32 * groups * -(-count * batch * heads // groups), 2, 1),
        (32 * groups, 1, 1),
        [((batch, heads, count, layout.words), mx.uint32)],
        make,
        f"{32 * groups}, {RESIDENT[tile]}" if tile in RESIDENT else "",
    )
    return out


def fast_kind(transform: Transform | None, dims: int) -> int | None:
    """How the seal kernel applies a transform: 0 not at all, 1 by Hadamard's and 2 by Fourier's
    butterflies, None: it cannot."""
    if transform is None:
        return 0
    return FAST_KINDS.get(transform.kind) if dims in FAST_DIMS else None


def seal_kind(transform: Transform | None, dims: int, tokens: int) -> int | None:
    """`fast_kind`, or DENSE for a square matrix and few tokens, where one dispatch is what counts.
    Of many tokens it is a product of MLX's, on matrix units where there are any."""
    kind = fast_kind(transform, dims)
    if kind is None and tokens <= DENSE_TOKENS and dims in DENSE_DIMS:
        own = transform.down.ndim > 3  # one for each of a batch
        return DENSE if transform.down.shape[-2:] == (dims, dims) and not own else None
    return kind


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
    """Keys or values of the first `count` records: [B, G, 16 count, R]. As `unseal`, one side."""
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
    """`sides` sides from side `first` on, 0: keys, 1: values."""
    batch, heads, capacity, words = buffer.shape
    n_sink, n_live = (0 if x is None else x[0].shape[2] for x in (sink, live))
    tokens = n_sink + count * TOKENS + n_live
    units = batch * heads * (count + sum(-(-n // TOKENS) for n in (n_sink, n_live)))
    empty = nothing(dtype), nothing(dtype)
    ranks = (layout.keys.dims, layout.values.dims)[first : first + sides]
    sizes = [batch * heads * tokens * rank for rank in ranks]
    (out,) = launch(
        "unseal",
        [
            *(buffer, nothing(mx.uint32) if headers is None else headers),
            *(*(sink or empty), *(live or empty)),
            ints(count, capacity, batch * heads, n_sink, n_live, first, 0, 0),
        ],
        {
            **{"T": dtype, "RECORD": words, "PAGE": layout.page, "HEADER": layout.header_words},
            **{"SIDE_K": layout.keys.words, "HEADER_K": layout.keys.header_words},
            **{"DIMS_K": layout.keys.dims, "DIMS_V": layout.values.dims},
            **side_template(layout.keys, "_K"),
            **side_template(layout.values, "_V"),
        },
        (32 * SIMDGROUPS * -(-units // SIMDGROUPS), sides, 1),
        (32 * SIMDGROUPS, 1, 1),
        [((sum(sizes),), dtype)],
        make,
    )
    parts = [out] if sides == 1 else mx.split(out, [sizes[0]])
    return [x.reshape(batch, heads, tokens, rank) for x, rank in zip(parts, ranks, strict=True)]


@lru_cache(maxsize=256)
def ints(*values: int) -> mx.array:
    """[n] int32 of sizes; the same sizes come back at every step and in every layer."""
    return mx.array(values, mx.int32)


@cache
def _scales(scale: float) -> mx.array:
    return mx.array([scale * LOG2E, LOG2E] + [0.0] * 6, mx.float32)


@cache
def nothing(dtype: mx.Dtype = mx.float32) -> mx.array:
    """What is handed over for an input that a kernel does not read."""
    return mx.zeros(8, dtype)


@dataclass(frozen=True)
class Run:
    """A second run of pages, behind the first, that has a stored domain of its own. As for `attend`;
    records: how many there are."""

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
    lengths: tuple[tuple[int, int, int], ...],
    scale: float,
    new_tokens: int,
    make: Factory,
    up: mx.array | None = None,
    window: int = 0,
    sinks: mx.array | None = None,
    headers: mx.array | None = None,
    second: Run | None = None,
    starts: tuple[int, ...] | None = None,
) -> mx.array:
    """Attention of a few new tokens over records and windows.

    q_pages: [B, G, N, RK] float32 in the stored domain; q_window: [B, G, N, D]; row i of a kv head
        belongs to new token i % new_tokens, the last tokens of live.
    buffer: [B, G, capacity, words]. headers: [B, G, pages, header words], for formats that have
        them. sink, live: (keys, values), [B, G, tokens, D].
    lengths: for each of the batch (records, sink tokens, live tokens).
    starts: where all of a batch share buffer [1, G, capacity, words] and headers, the first record
        of each, the first of a page.
    up: [RV, D], [G, RV, D] or [B, G, RV, D] float32, from the stored domain of the values to the
        model's, or None. second: more records, behind these, in the same pass.
    window: sliding window in tokens, 0 for none. sinks: [H] logits of attention sinks.
    Returns [B, G, N, D] in the dtype of q_window.
    """
    batch, heads, rows, dims = q_window.shape
    capacity = buffer.shape[2]
    sink = sink or live  # never read: its length is 0
    tile = rows_of_tile(max(dims, layout.keys.dims, layout.values.dims), rows, make)
    tiles = -(-rows // tile)
    most = max(records for records, _, _ in lengths)
    starts = starts or own_starts(batch, heads, capacity)
    more, runs = (second.records, 2) if second else (0, 1)
    window_units = max(-(-s // TOKENS) + -(-n // TOKENS) for _, s, n in lengths)
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
    width = BLOCK * max(layout.values.blocks, -(-dims // BLOCK))
    tokens = (sink[0].shape[2], live[0].shape[2])
    numbers = _scales(scale)
    out, stats = launch(
        "attend",
        [
            q_pages,
            q_window,
            buffer,
            nothing(mx.uint32) if headers is None else headers,
            *sink,
            *live,
            ints(
                *(rows, page_splits, capacity, *tokens, new_tokens, window, heads),
                *(first, after.buffer.shape[2] if second else 0, runs, 0),
            ),
            ints(
                *(n for at, one in zip(starts, lengths, strict=True) for n in (*one, at, more)),
                *[0] * 4,
            ),
            numbers,
            after.buffer,
            nothing(mx.uint32) if after.headers is None else after.headers,
        ],
        {
            "T": q_window.dtype,
            "QT": tile,
            "S": SIMDGROUPS,
            "D": dims,
            "RK": layout.keys.dims,
            "RV": layout.values.dims,
            "RECORD": layout.words,
            "PAGE": layout.page,
            "HEADER": layout.header_words,
            **side_template(layout.keys, "_K"),
            **side_template(layout.values, "_V"),
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
            nothing() if sinks is None else sinks.astype(mx.float32),
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
            ),
        ],
        {
            "T": q_window.dtype,
            "WIDTH": width,
            "RV": layout.values.dims,
            "D": dims,
            "HAS_UP": int(up is not None),
            "HAS_SINKS": int(sinks is not None),
        },
        (threads * batch * heads * rows, 1, 1),
        (threads, 1, 1),
        [((batch, heads, rows, dims), q_window.dtype)],
        make,
    )
    return merged


def rows_of_tile(dims: int, rows: int, make: Factory) -> int:
    """Query rows of a threadgroup of `attend`: 1, 2 or 4, so that few kernels are built. dims: the largest
    of D and the stored dims."""
    most = TILE_ROWS if dims <= TILE_DIMS else 1
    if make is mx.fast.cuda_kernel:
        most = TILE_ROWS_CUDA
    return next(n for n in (1, 2, 4) if rows <= n or n == most)


def splits_for(records: int, windows: int, others: int, cores: int | None) -> tuple[int, int]:
    """How many threadgroups share the records of a head, and how many its windows.

    windows: units of 16 tokens. others: heads times tiles of rows. cores: of the GPU; None: enough for
    splits of `SPLIT_RECORDS`.
    """
    if cores is None:
        return min(MAX_SPLITS, max(1, -(-records // SPLIT_RECORDS))), 1
    most = MAX_SPLITS // 2  # of each, so that the merge can take both
    pages = max(1, min(most, round(PER_CORE * cores / others), -(-records // FEW_RECORDS)))
    # Windows come besides: they end early, and have as many units each as a split of the records at least.
    each = max(SIMDGROUPS, -(-records // pages))
    return pages, max(1, min(most, -(-windows // each)))


@lru_cache(maxsize=64)
def own_starts(batch: int, heads: int, capacity: int) -> tuple[int, ...]:
    """The first record of each of a batch in [B, G, capacity, words]."""
    return tuple(i * heads * capacity for i in range(batch))


def _both_up(
    first: mx.array | None, second: mx.array | None, batch: int, heads: int
) -> mx.array | None:
    """[2, B, G, RV, D] of two runs."""
    if first is None or second is None:
        return None
    shape = (batch, heads, *first.shape[-2:])
    return mx.stack([mx.broadcast_to(up, shape) for up in (first, second)])


def record_layout(config, key_dims: int, value_dims: int) -> RecordLayout:
    """The layout of a cache whose sides pass `records.why_not`."""
    return RecordLayout(
        records.layout(config.keys.quantizer, key_dims, config.page, keys=True),
        records.layout(config.values.quantizer, value_dims, config.page, keys=False),
    )
