"""Reading page records: dequantize decodes them, attend computes attention over them. Plain-ops twins:
`codec.records.to_codes`, and `cache.attention` over `CodePages`.

`builder` builds the kernels (`launch`); tests pass the emulator's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import mlx.core as mx

from mlxkv.codec.transform import Transform, kept_with
from mlxkv.formats.layout import BLOCK, TOKENS, SideLayout
from mlxkv.formats.records import RecordLayout
from mlxkv.formats.sizes import DECODE_TOKENS
from mlxkv.metal import gpu
from mlxkv.metal.launch import KernelBuilder, launch
from mlxkv.metal.lengths import Lengths, Splits
from mlxkv.metal.template import (
    Pair,
    cap_bits,
    exponents,
    ints,
    mixed_bits_table,
    nothing,
    sides_template,
)

SIMDGROUPS = 4  # per threadgroup
SPLIT_RECORDS = 16  # minimum records per split, so that merging stays small
FEW_RECORDS = 2 * SIMDGROUPS  # minimum records per split where the number of cores decides
# Simdgroups to launch per Apple core: as many as its registers hold, of 128 a thread.
PER_CORE = 12
MAX_SPLITS = 128
MOST_NEW = DECODE_TOKENS  # most new tokens per call of `attend`: more are a prefill
# Query rows per threadgroup: of codes that are multiplied as they are, of those that are decoded first.
MOST_ROWS, DECODED_ROWS = 4, 2
MULTIPLIED = {"token", "channel", "shared", "blocks"}  # kinds of such codes
# Blocks of outputs, times rows, of a simdgroup: a lane holds four numbers of each, and an Apple GPU has 128 registers.
LANE_BLOCKS = 12
FEW_BLOCKS = 8  # blocks times rows for which threadgroup memory holds what four teams need
MOST_GROUPS = 4  # of values whose scales multiply probabilities
MOST_GROUPED_DIMS = 256  # beyond, threadgroup memory holds one scale of them


@dataclass(frozen=True, eq=False)
class Run:
    """Pages that share one transform: the first `records` of buffer [B, G, capacity, words] in `layout`.

    page: records quantized together.
    transforms: of keys and of values, shared by all heads, per kv head, or per sequence and kv head; None: no
        transform. headers: [B, G, pages, header words], for formats with headers. maps: the transforms as tiles read
        them, cached at the first use.
    """

    buffer: mx.array
    records: int
    layout: RecordLayout
    page: int = 1
    transforms: tuple[Transform | None, Transform | None] = (None, None)
    headers: mx.array | None = None
    maps: list = field(default_factory=list, repr=False)


def dequantize(
    run: Run,
    dtype: mx.Dtype,
    builder: KernelBuilder,
    sink: Pair | None = None,
    recent: Pair | None = None,
) -> Pair:
    """Return (keys, values): sink, pages of `run` in their stored domain, recent, in one dispatch.

    sink, recent: (keys, values), [B, G, tokens, R] in `dtype`, or None. Returns [B, G, all tokens, R] each, in `dtype`.
    """
    batch, heads = run.buffer.shape[:2]
    tokens = run.records * TOKENS + sum(x[0].shape[2] for x in (sink, recent) if x is not None)
    dims = run.layout.keys.dims, run.layout.values.dims
    key_size, all_ = (batch * heads * tokens * n for n in (dims[0], sum(dims)))
    # Values would be misaligned for wide stores, or the array longer than MLX allows.
    if key_size % 8 or all_ >= 1 << 31:
        keys, values = (_dequantize(run, dtype, builder, sink, recent, i, 1)[0] for i in range(2))
    else:
        keys, values = _dequantize(run, dtype, builder, sink, recent, 0, 2)
    return keys, values


def dequantize_side(run: Run, keys: bool, dtype: mx.Dtype, builder: KernelBuilder) -> mx.array:
    """Dequantize one side without windows: [B, G, 16 records, R]."""
    return _dequantize(run, dtype, builder, None, None, int(not keys), 1)[0]


def _dequantize(
    run: Run,
    dtype: mx.Dtype,
    builder: KernelBuilder,
    sink: Pair | None,
    recent: Pair | None,
    first: int,
    sides: int,
) -> list[mx.array]:
    """Dequantize `sides` sides from side `first` on, 0: keys, 1: values."""
    (batch, heads, capacity, _), layout, count = run.buffer.shape, run.layout, run.records
    n_sink, n_recent = (0 if x is None else x[0].shape[2] for x in (sink, recent))
    tokens = n_sink + count * TOKENS + n_recent
    units = batch * heads * (count + sum(-(-n // TOKENS) for n in (n_sink, n_recent)))
    empty = nothing(dtype), nothing(dtype)
    ranks = (layout.keys.dims, layout.values.dims)[first : first + sides]
    sizes = [batch * heads * tokens * rank for rank in ranks]
    (out,) = launch(
        "dequantize",
        [
            *(run.buffer, _shared(run)),
            *(*(sink or empty), *(recent or empty)),
            ints(count, capacity, batch * heads, n_sink, n_recent, first, 0, 0),
        ],
        {
            "T": dtype,
            **({} if layout.mixed_bits else _dequantize_template(layout)),
            **sides_template(layout),
        },
        (32 * SIMDGROUPS * -(-units // SIMDGROUPS), sides, 1),
        (32 * SIMDGROUPS, 1, 1),
        [((sum(sizes),), dtype)],
        builder,
    )
    parts = [out] if sides == 1 else mx.split(out, [sizes[0]])
    return [x.reshape(batch, heads, tokens, rank) for x, rank in zip(parts, ranks, strict=True)]


def _shared(run: Run) -> mx.array:
    """Return the kernels' header input: page headers, the layer's mixed-bits table, or an unused placeholder."""
    if run.layout.mixed_bits:
        return mixed_bits_table(run.layout)
    return nothing(mx.uint32) if run.headers is None else run.headers


@lru_cache(maxsize=256)
def _dequantize_template(layout: RecordLayout) -> dict[str, object]:
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
def _attend_template(layout: RecordLayout, dims: int, parts: int) -> dict[str, object]:
    mixed_bits = layout.mixed_bits  # one kernel serves all layers
    decoded = _decoded(layout.keys, parts), _decoded(layout.values, parts)
    return {
        "D": dims,
        "RK": dims if mixed_bits else layout.keys.dims,
        "RV": dims if mixed_bits else layout.values.dims,
        "RECORD": 0 if mixed_bits else layout.words,
        "PAGE": layout.page,
        "HEADER": layout.header_words,
        "DECODED_K": int(decoded[0]),
        "DECODED_V": int(decoded[1]),
        "PLAIN_K": int(not (decoded[0] or mixed_bits)),
        "PLAIN_V": int(not (decoded[1] or mixed_bits)),
        **sides_template(layout),
    }


def _decoded(at: SideLayout, parts: int) -> bool:
    """Return whether `attend` decodes a side before it multiplies, rather than multiply codes.

    parts: simdgroups that share the dims of a token.
    """
    if at.widths:
        return False
    if at.kind not in MULTIPLIED:
        return True
    if at.bits == 3 and parts > 1 and -(-at.blocks // parts) % 2:  # two blocks share a word
        return True
    if at.keys:
        return at.group % (2 * TOKENS) != 0 if at.channel else at.groups > 1
    apart = at.groups > 1 and (at.group % BLOCK != 0 or at.dims > MOST_GROUPED_DIMS)
    return at.channel or at.groups > MOST_GROUPS or apart


def attend(
    q: mx.array,
    runs: Sequence[Run],
    sink: Pair | None,
    recent: Pair,
    lengths: Lengths,
    scale: float,
    builder: KernelBuilder,
    sink_logits: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Compute attention of a few new tokens over records and windows.

    q: [B, H, L, D], queries of the last L tokens of recent. runs: one or two, in token order; if sequences share
        buffers, [1, G, capacity, words], `lengths` has the first record of each.
    sink, recent: (keys, values), [B, G, tokens, D].
    sink_logits: [H] logits of attention sinks. softcap: cap of scores (soft-capping).
    Returns [B, H, L, D] in the dtype of recent.
    """
    (batch, _, new_tokens, dims), heads, dtype = q.shape, recent[0].shape[1], recent[0].dtype
    run, *more_runs = runs
    layout, capacity, mixed_bits = run.layout, run.buffer.shape[2], run.layout.mixed_bits
    window_units = sum(-(-x[0].shape[2] // TOKENS) for x in (sink, recent) if x is not None)
    sink = sink or recent  # never read: its length is 0
    shape, q = q.shape, q.reshape(batch, heads, -1, dims)
    rows = q.shape[2]
    tile, parts, simdgroups = tile_of(layout, dims, rows)
    tiles = -(-rows // tile)
    second_count = more_runs[0].records if more_runs else 0
    counts = lengths.division.records, *(more.records for more in more_runs)
    wanted = splits_for(
        sum(counts), window_units, batch * heads * tiles * simdgroups, gpu.cores(builder)
    )
    splits = Splits.of_runs(wanted, counts)
    map_type = mx.float32 if dtype == mx.float32 else mx.float16
    up, down = _up(run), _down(run, map_type)
    second, more_headers, down_2 = nothing(mx.uint32), nothing(mx.uint32), None
    if more_runs:
        down_2 = _down(more_runs[0], map_type)
        up = _both_up(up, _up(more_runs[0]), batch, heads)
        second = more_runs[0].buffer
        if more_runs[0].headers is not None:
            more_headers = more_runs[0].headers
    stored = dims if mixed_bits else layout.values.dims
    width = BLOCK * max(-(-stored // BLOCK), -(-dims // BLOCK))
    numbers = exponents(scale)
    out, stats = launch(
        "attend",
        [
            q.astype(dtype),
            run.buffer,
            _shared(run),
            *sink,
            *recent,
            ints(
                *(rows, splits.pages, capacity, sink[0].shape[2], recent[0].shape[2], new_tokens),
                *(heads, splits.first, second.shape[2] if more_runs else 0),
                *(_heads(down), _heads(down_2)),
            ),
            lengths.with_more(second_count),
            numbers,
            nothing(map_type) if down is None else down,
            second,
            more_headers,
            nothing(map_type) if down_2 is None else down_2,
        ],
        {
            "T": dtype,
            "QT": tile,
            "S": simdgroups,
            "PARTS": parts,
            "CAP": cap_bits(softcap),
            "HAS_DOWN": int(down is not None),
            "MAP": map_type,
            **_attend_template(layout, dims, parts),
        },
        (32 * simdgroups * tiles, splits.total, batch * heads),
        (32 * simdgroups, 1, 1),
        [
            ((batch * heads * rows, splits.total, width), mx.float32),
            ((batch * heads * rows, splits.total, 2), mx.float32),
        ],
        builder,
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
                splits.total,
                splits.pages,
                rows,
                heads,
                new_tokens,
                1 if up is None else up.size // (len(runs) * layout.values.dims * dims),
                splits.first,
                len(runs),
                *((layout.values.dims, *[0] * 7) if mixed_bits else ()),
            ),
        ],
        {
            "T": dtype,
            "WIDTH": width,
            "RV": 0 if mixed_bits else layout.values.dims,
            "D": dims,
            "HAS_UP": int(up is not None),
            "HAS_SINKS": int(sink_logits is not None),
        },
        (threads * batch * heads * rows, 1, 1),
        (threads, 1, 1),
        [((batch, heads, rows, dims), dtype)],
        builder,
    )
    return merged.reshape(shape)


def _down(run: Run, dtype: mx.Dtype) -> mx.array | None:
    """Return the map of queries into the stored domain of keys: [D, R], [G, D, R] or [B, G, D, R], or None."""
    transform = run.transforms[0]
    if transform is None:
        return None
    return _following(transform, dtype) if transform.up.ndim == 4 else _lasting(transform, dtype)


@kept_with
def _lasting(transform: Transform, dtype: mx.Dtype) -> mx.array:
    with mx.stream(mx.cpu):
        down = _following(transform, dtype)
        mx.eval(down)
    return down


@kept_with
def _following(transform: Transform, dtype: mx.Dtype) -> mx.array:
    """Return the map unevaluated: a transform that follows the text depends on tokens still being read."""
    return mx.contiguous(transform.up.swapaxes(-1, -2)).astype(dtype)


def _heads(down: mx.array | None) -> int:
    """Return the number of heads that have a map of their own, 1 if all share it."""
    return 1 if down is None else down.size // (down.shape[-1] * down.shape[-2])


def _up(run: Run) -> mx.array | None:
    """Return the map from stored values to the model's: [RV, D], [G, RV, D] or [B, G, RV, D] float32, or None."""
    transform = run.transforms[1]
    return None if transform is None else transform.up


def tile_of(layout: RecordLayout, dims: int, rows: int) -> tuple[int, int, int]:
    """Return how `attend` shares its work: query rows per threadgroup, simdgroups that share the dims of a token, and
    simdgroups per threadgroup.

    dims: head dim D. rows: query rows per kv head.
    """
    blocks = -(-max(dims, layout.keys.dims, layout.values.dims) // BLOCK)
    most = MOST_ROWS if multiplies(layout) else DECODED_ROWS
    wanted, tile, parts = -(-rows // -(-rows // most)), 0, 0
    for parts in (1, 2, 4):
        tile = -(-wanted // parts) * parts
        if tile * -(-blocks // parts) <= LANE_BLOCKS:
            break
    # As many as threadgroup memory holds.
    return tile, parts, max(parts, SIMDGROUPS if tile * blocks <= FEW_BLOCKS else SIMDGROUPS // 2)


def multiplies(layout: RecordLayout) -> bool:
    """Return whether codes of both sides are of kinds that are multiplied without being decoded first."""
    return {layout.keys.kind, layout.values.kind} <= MULTIPLIED


def splits_for(records: int, windows: int, simdgroups: int, cores: int | None) -> tuple[int, int]:
    """Return the number of splits of a head's records, and of its windows.

    windows: units of 16 tokens. simdgroups: of all heads and tiles of rows, with one split. cores: GPU cores; None: use
    splits of `SPLIT_RECORDS`.
    """
    if cores is None:
        return min(MAX_SPLITS, max(1, -(-records // SPLIT_RECORDS))), 1
    limit = MAX_SPLITS // 2  # for each, so that the merge fits both
    pages = max(1, min(limit, round(PER_CORE * cores / simdgroups), -(-records // FEW_RECORDS)))
    # Windows have separate splits, each with at least as many units as a split of the records.
    least_units = max(SIMDGROUPS, -(-records // pages))
    return pages, max(1, min(limit, -(-windows // least_units)))


def _both_up(
    first: mx.array | None, second: mx.array | None, batch: int, heads: int
) -> mx.array | None:
    """Stack the value maps of two runs: [2, B, G, RV, D]."""
    if first is None or second is None:
        return None
    shape = (batch, heads, *first.shape[-2:])
    return mx.stack([mx.broadcast_to(up, shape) for up in (first, second)])
