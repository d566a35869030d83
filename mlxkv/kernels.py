"""The kernels with their shapes: seal, unseal, attend. Plain-ops twins: records.py, attention.py.

`make` is the factory that builds them (metal/launch.py); tests hand in the emulator's.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2

import mlx.core as mx

from mlxkv import records
from mlxkv.metal.launch import Factory, launch
from mlxkv.records import BLOCK, TOKENS, SideLayout

SIMDGROUPS = 4  # of a threadgroup
SPLIT_RECORDS = 16  # records per split at least, so that merging stays small
MAX_SPLITS = 128
LOG2E = log2(e)


@dataclass(frozen=True)
class RecordLayout:
    """Keys and values of a record."""

    keys: SideLayout
    values: SideLayout

    @property
    def words(self) -> int:
        return self.keys.words + self.values.words


def _side(at: SideLayout, suffix: str = "") -> dict[str, object]:
    return {
        f"BITS{suffix}": at.bits,
        f"GROUP{suffix}": at.group,
        f"SYMMETRIC{suffix}": int(at.symmetric),
    }


def seal_side(x: mx.array, at: SideLayout, make: Factory) -> mx.array:
    """x: [B, G, T, R] float32 in the stored domain, T a multiple of 16 -> [B, G, T/16, words]."""
    batch, heads, tokens, dims = x.shape
    count = batch * heads * tokens // TOKENS
    (words,) = launch(
        "seal",
        [x.astype(mx.float32), mx.array([count] + [0] * 7, mx.int32)],
        {**_side(at), "DIMS": dims, "KEYS": int(at.keys)},
        (32 * SIMDGROUPS * -(-count // SIMDGROUPS), 1, 1),
        (32 * SIMDGROUPS, 1, 1),
        [((batch, heads, tokens // TOKENS, at.words), mx.uint32)],
        make,
    )
    return words


def unseal_side(
    buffer: mx.array, count: int, layout: RecordLayout, keys: bool, dtype: mx.Dtype, make: Factory
) -> mx.array:
    """The first `count` records of [B, G, capacity, words] -> [B, G, 16 count, R] in `dtype`."""
    at = layout.keys if keys else layout.values
    batch, heads, capacity, words = buffer.shape
    first = 0 if keys else layout.keys.words
    units = batch * heads * count
    size = mx.array([count, capacity, batch * heads, first] + [0] * 4, mx.int32)
    (out,) = launch(
        "unseal",
        [buffer, size],
        {**_side(at), "T": dtype, "DIMS": at.dims, "KEYS": int(keys), "RECORD": words},
        (32 * SIMDGROUPS * -(-units // SIMDGROUPS), 1, 1),
        (32 * SIMDGROUPS, 1, 1),
        [((batch, heads, count * TOKENS, at.dims), dtype)],
        make,
    )
    return out


def _padded(q: mx.array) -> mx.array:
    """[B, G, N, R] -> [B, G, N, whole blocks] float32."""
    pad = -q.shape[-1] % BLOCK
    q = q.astype(mx.float32)
    return mx.pad(q, [(0, 0)] * 3 + [(0, pad)]) if pad else q


def attend(
    q_pages: mx.array,
    q_window: mx.array,
    buffer: mx.array,
    layout: RecordLayout,
    sink: tuple[mx.array, mx.array] | None,
    live: tuple[mx.array, mx.array],
    lengths: mx.array,
    scale: float,
    new_tokens: int,
    make: Factory,
    window: int = 0,
    sinks: mx.array | None = None,
    most_records: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Attention over records and windows.

    q_pages: [B, G, N, RK] in the stored domain; q_window: [B, G, N, D]; row i of a kv head belongs
        to new token i % new_tokens. buffer: [B, G, capacity, words].
    sink, live: (keys, values), [B, G, tokens, D]; lengths: [B, 4] int32, records, sink tokens, live
        tokens, 0. window: sliding window in tokens, 0 for none. sinks: [H] logits.
    Returns (pages [B, G, N, RV] in the stored domain, windows [B, G, N, D]), float32, to be added
    after the first has been transformed back.
    """
    batch, heads, rows, dims = q_window.shape
    capacity = buffer.shape[2]
    sink = sink or live  # never read: its length is 0
    tile = min(4, rows)
    tiles = -(-rows // tile)
    records_in_use = capacity if most_records is None else most_records
    page_splits = min(MAX_SPLITS, max(1, -(-records_in_use // SPLIT_RECORDS)))
    splits = page_splits + 1
    width = BLOCK * max(layout.values.blocks, -(-dims // BLOCK))
    numbers = [rows, page_splits, capacity, sink[0].shape[2], live[0].shape[2]]
    size = mx.array([*numbers, new_tokens, window, heads], mx.int32)
    (out, stats) = launch(
        "attend",
        [
            _padded(q_pages) * (scale * LOG2E),
            _padded(q_window) * (scale * LOG2E),
            buffer,
            *sink,
            *live,
            size,
            lengths,
        ],
        {
            "T": live[0].dtype,
            "QT": tile,
            "S": SIMDGROUPS,
            "D": dims,
            "RK": layout.keys.dims,
            "RV": layout.values.dims,
            "RECORD": layout.words,
            **_side(layout.keys, "_K"),
            **_side(layout.values, "_V"),
        },
        (32 * SIMDGROUPS, splits, batch * heads * tiles),
        (32 * SIMDGROUPS, 1, 1),
        [
            ((batch * heads * rows, splits, width), mx.float32),
            ((batch * heads * rows, splits, 2), mx.float32),
        ],
        make,
    )
    has_sinks = sinks is not None
    logits = sinks.astype(mx.float32) * LOG2E if has_sinks else mx.zeros(8)
    size = mx.array([splits, page_splits, rows, heads, new_tokens] + [0] * 3, mx.int32)
    threads = 32 * min(8, width // BLOCK)
    pages, windows = launch(
        "merge",
        [out, stats, logits, size],
        {"WIDTH": width, "RV": layout.values.dims, "D": dims, "HAS_SINKS": int(has_sinks)},
        (threads * batch * heads * rows, 1, 1),
        (threads, 1, 1),
        [
            ((batch, heads, rows, layout.values.dims), mx.float32),
            ((batch, heads, rows, dims), mx.float32),
        ],
        make,
    )
    return pages, windows


def record_layout(config, key_dims: int, value_dims: int) -> RecordLayout:
    """The layout of a cache whose sides pass `records.why_not`."""
    return RecordLayout(
        records.layout(config.keys.quantizer, key_dims, config.page, keys=True),
        records.layout(config.values.quantizer, value_dims, config.page, keys=False),
    )
