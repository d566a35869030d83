"""Decode attention over page records by mlxkv's Metal kernels `attend` and `merge`, for one run of pages."""

from __future__ import annotations

from functools import lru_cache
from math import e, log2

import numpy as np
import torch

from cuda_track.mps.pages import RecordPages
from cuda_track.mps.source import launch
from mlxkv.formats import levels
from mlxkv.formats.records import BLOCK, TOKENS, SideLayout

SIMDGROUPS = 4  # of a threadgroup
SPLIT_RECORDS = 16  # records per split at least
MAX_SPLITS = 128
# Query rows of a threadgroup, up to so many dims: an Apple GPU has 128 registers.
TILE_ROWS, TILE_DIMS = 2, 128
MAX_TERMS = 8  # of the polynomial through the levels of a codebook
Pair = tuple[torch.Tensor, torch.Tensor]


def attend(
    queries: torch.Tensor,
    pages: RecordPages,
    sink: Pair | None,
    recent: Pair,
    scale: float,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with queries [B, H, L, D], causal among the new tokens, which are the last of recent.

    recent, sink: (keys, values) [B, G, T, D]. sink_logits: [H]. Returns [B, H, L, D].
    """
    batch, all_heads, new, dims = queries.shape
    heads, device, kind = recent[0].shape[1], queries.device, recent[0].dtype
    q = queries.reshape(batch, heads, -1, dims)
    rows = q.shape[2]
    keys, values = pages.layout.keys, pages.layout.values
    up = pages.codecs[1].transform and pages.codecs[1].transform.up
    count, capacity = pages.tokens // TOKENS, pages.buffer.shape[2]
    tile = min(rows, TILE_ROWS if max(dims, keys.dims, values.dims) <= TILE_DIMS else 1)
    page_splits = min(MAX_SPLITS, max(1, -(-count // SPLIT_RECORDS)))
    splits = page_splits + 1
    width = BLOCK * max(values.blocks, -(-dims // BLOCK))
    windows = [x.contiguous() for x in (*(sink or recent), *recent)]
    lengths = (count, sink[0].shape[2] if sink else 0, recent[0].shape[2])
    starts = (i * heads * capacity for i in range(batch))  # first records
    tokens = windows[0].shape[2], windows[2].shape[2]
    numbers = _numbers(scale, device)
    nothing = _ints(device, *[0] * 8)
    headers = nothing if pages.headers is None else pages.headers
    page = max(TOKENS, keys.page, values.page)
    out, stats = launch(
        "attend",
        [
            *(pages.codecs[0].query(q), q.to(kind), pages.buffer, headers, *windows),
            _ints(
                *(device, rows, page_splits, capacity, *tokens, new, heads), *(page_splits, 0, 1)
            ),
            *(
                _ints(device, *(n for at in starts for n in (*lengths, at, 0)), *[0] * 4),
                numbers,
                nothing,
                nothing,
            ),
        ],
        {
            **{"T": kind, "QT": tile, "S": SIMDGROUPS, "CAP": 0, "D": dims, "RK": keys.dims},
            **{"RV": values.dims, "RECORD": keys.words + values.words, "PAGE": page},
            "HEADER": keys.header_words + values.header_words,
            **_side(keys, "_K"),
            **_side(values, "_V"),
        },
        (32 * SIMDGROUPS * -(-rows // tile), splits, batch * heads),
        (32 * SIMDGROUPS, 1, 1),
        [
            ((batch * heads * rows, splits, width), torch.float32),
            ((batch * heads * rows, splits, 2), torch.float32),
        ],
    )
    threads = 32 * min(8, width // BLOCK)
    up_count = 1 if up is None else up.numel() // (values.dims * dims)
    (merged,) = launch(
        "merge",
        [
            *(out, stats, numbers if up is None else up),
            *(numbers if sink_logits is None else sink_logits.float(), numbers),
            _ints(device, splits, page_splits, rows, heads, new, up_count, page_splits, 1),
        ],
        {
            **{"T": kind, "WIDTH": width, "RV": values.dims, "D": dims},
            **{"HAS_UP": int(up is not None), "HAS_SINKS": int(sink_logits is not None)},
        },
        (threads * batch * heads * rows, 1, 1),
        (threads, 1, 1),
        [((batch, heads, rows, dims), kind)],
    )
    return merged.reshape(batch, all_heads, new, dims).to(queries.dtype)


def _side(at: SideLayout, suffix: str) -> dict[str, object]:
    """Return the template values of a side. C: coefficients of the levels of a codebook, as the integers of their
    float32 bits."""
    terms = np.zeros(MAX_TERMS, np.float32)
    if at.codebook:
        coefficients = levels.polynomial(at.dims, at.bits) / 2**at.bits
        terms[: len(coefficients)] = coefficients
    return {
        **{f"BITS{suffix}": at.bits, f"GROUP{suffix}": at.group},
        **{f"SYMMETRIC{suffix}": int(at.symmetric), f"CHANNEL{suffix}": int(at.channel)},
        **{f"PAIRS{suffix}": int(at.pairs)},
        **{f"PER_TOKEN{suffix}": int(not (at.channel or at.tree or at.bits == 16))},
        **{f"CODEBOOK{suffix}": int(at.codebook), f"TREE{suffix}": 0},
        f"BOOKS{suffix}": (0,),
        f"C{suffix}": tuple(int(x) for x in terms.view(np.int32)),
    }


@lru_cache(maxsize=256)
def _ints(device: torch.device, *values: int) -> torch.Tensor:
    """Sizes as [n] int32, cached: they repeat at every step and in every layer."""
    return torch.tensor(values, dtype=torch.int32, device=device)


@lru_cache(maxsize=64)
def _numbers(scale: float, device: torch.device) -> torch.Tensor:
    return torch.tensor([scale * log2(e), log2(e), *[0.0] * 6], device=device)


def why_not(queries: torch.Tensor, mask: torch.Tensor | str | None, limit: int) -> str | None:
    """Return why the kernel does not compute this attention, or None. limit: new tokens that it takes."""
    if queries.shape[2] > limit:
        return f"more than {limit} new tokens are a prefill"
    if isinstance(mask, torch.Tensor):
        return "the kernel takes no mask array"
    return None if mask is not None or queries.shape[2] == 1 else "without a causal mask"
