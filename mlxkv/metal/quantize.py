"""Quantizing: kernels that encode keys and values into page records. Plain-ops twins: `encode` of the
methods in `codec`, and `codec.records.to_records`.

`make` is the factory that builds them (`launch`); tests pass the emulator's.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from mlxkv.codec import affine
from mlxkv.codec.codec import Codec
from mlxkv.codec.transform import Transform
from mlxkv.formats.config import SCALED
from mlxkv.formats.layout import TOKENS
from mlxkv.formats.records import RecordLayout
from mlxkv.metal.launch import Factory, launch
from mlxkv.metal.template import (
    Pair,
    ints,
    mixed_bits_quantizing,
    nothing,
    quantizing_template,
    side_template,
)

SIMDGROUPS = 4  # of a threadgroup
# pairs of floats in the threadgroup memory of a dispatch that quantizes: 16 KiB, or one tile
TILES = 2048
# Threadgroups that a multiprocessor of an NVIDIA GPU is to hold, by pairs of a tile: enough simdgroups
# to wait for memory, with few registers spilled (counted by the compiler, not tuned by timing).
RESIDENT = {512: 8, 1024: 10, 2048: 12}
MAX_RANK = 64  # of a limit that the kernels find: the longest list of text/quantize/select.h
FAST_DIMS = (64, 128, 256, 512)
FAST_KINDS = {"hadamard": 1, "srft": 2, SCALED: 4}
DENSE, DENSE_DIMS, DENSE_TOKENS = 3, (64, 96, 128, 192, 256), 512
CHANNEL_SIMDGROUPS = 8
# Blocks of dims that fit in an Apple GPU's 128 registers; on NVIDIA all do, and quantize faster.
CHUNK = 2
CHANNEL_DIMS = (
    256  # of keys: ranges of all channels, from every simdgroup, fit in threadgroup memory
)


def record_writer(layout: RecordLayout) -> Callable[..., dict[str, mx.array]] | None:
    """Return what quantizes pages of this layout, called as `quantize_pages`; None where plain ops have to."""
    if why_no_channels(layout) is None:
        return quantize_channels
    return _quantize_records if layout.quantized_by_kernel else None


def clip_ranks(codecs: tuple[Codec, Codec], dims: tuple[int, int]) -> tuple[int, int]:
    """Return the `ranks` of `quantize_pages` for keys and values of so many stored dims."""
    keys, values = (code.spec.clip_rank(n) for code, n in zip(codecs, dims, strict=True))
    return keys, values


def _quantize_records(*arguments) -> dict[str, mx.array]:
    return {"records": quantize_pages(*arguments)}


def quantize_pages(
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

    start, tokens: which tokens are encoded, all by default; a multiple of 16. Pass whole buffers, since
        MLX copies slices.
    transforms: of keys and values. One that the kernel cannot apply (`quantize_kind`) is an MLX product
        before the dispatch.
    ranks: of keys and values, `Affine.clip_rank`. Beyond `MAX_RANK` MLX clips before the dispatch.
    """
    batch, heads, length, _ = pair[0].shape
    tokens = length - start if tokens is None else tokens
    count = tokens // TOKENS
    inputs, tables, places, matrices, tile = [], [], [], [], 16
    template: dict[str, object] = {}
    sides = zip("KV", pair, (layout.keys, layout.values), transforms, ranks, strict=True)
    for name, x, at, transform, rank in sides:
        kind, first = quantize_kind(transform, x.shape[3], tokens), start
        if kind is None or rank > MAX_RANK or (at.widths and kind):
            x, kind, first = x[:, :, start : start + tokens], 0, 0
            x = x if transform is None else transform.store(x)
            if rank > MAX_RANK:
                x, rank = affine.clip_rows(x.astype(mx.float32), rank), 1
        elif x.dtype not in (mx.float32, mx.float16, mx.bfloat16):
            x = x.astype(mx.float32)
        inputs.append(x)
        table = nothing()
        if transform is not None and kind:
            table = transform.down if kind == DENSE else transform.table
            assert table is not None  # every fast form has one
        matrices.append(max(1, table.size // x.shape[3] ** 2))
        tables.append(mixed_bits_quantizing(at) if at.widths else table)
        places += [first, x.shape[2]]
        template |= {f"T_{name}": x.dtype} | side_template(at, f"_{name}")
        if not at.widths:
            template |= {f"D_{name}": at.dims, f"KIND_{name}": kind, f"RANK_{name}": rank}
            template |= quantizing_template(at, f"_{name}")
        tile = max(tile, TOKENS * at.dims // 2 if kind else 0)
    groups = max(1, min(SIMDGROUPS, TILES // tile))
    (out,) = launch(
        "quantize",
        [*inputs, *tables, ints(count, batch * heads, *places, *matrices)],
        template | {"S": groups} | ({} if layout.mixed_bits else {"TILE": tile}),
        (32 * groups * -(-count * batch * heads // groups), 2, 1),
        (32 * groups, 1, 1),
        [((batch, heads, count, layout.words), mx.uint32)],
        make,
        f"{32 * groups}, {RESIDENT[tile]}" if tile in RESIDENT else "",
    )
    return out


def fast_kind(transform: Transform | None, dims: int) -> int | None:
    """Return how the quantize kernel applies a transform: 0 not at all, 1 by Hadamard's, 2 by Fourier's butterflies
    and 4 by these and scales, None: it cannot."""
    if transform is None:
        return 0
    return FAST_KINDS.get(transform.kind) if dims in FAST_DIMS else None


def quantize_kind(transform: Transform | None, dims: int, tokens: int) -> int | None:
    """`fast_kind`, or DENSE for a square matrix and few tokens, where one dispatch is what counts.
    Of many tokens it is a product of MLX's, on matrix units where there are any."""
    kind = fast_kind(transform, dims)
    if kind is None and transform is not None and tokens <= DENSE_TOKENS and dims in DENSE_DIMS:
        by_sequence = transform.down.ndim > 3  # one for each of a batch
        return DENSE if transform.down.shape[-2:] == (dims, dims) and not by_sequence else None
    return kind


def why_no_channels(layout: RecordLayout) -> str | None:
    """Return why `quantize_channels` does not write such records, or None."""
    keys, values = layout.keys, layout.values
    if not keys.channel or keys.pairs:
        return "keys without scales per channel alone"
    if values.kind not in ("token", "blocks"):
        return "values that are not min-max or abs-max codes per token"
    if keys.dims > CHANNEL_DIMS:
        return f"ranges of {keys.dims} channels do not fit in threadgroup memory"
    return None


def quantize_channels(
    pair: Pair,
    layout: RecordLayout,
    make: Factory,
    transforms: tuple[Transform | None, Transform | None] = (None, None),
    start: int = 0,
    tokens: int | None = None,
    ranks: tuple[int, int] = (1, 1),
) -> dict[str, mx.array]:
    """(keys, values), each [B, G, T, D] -> records [B, G, tokens / 16, words] and headers
    [B, G, pages, header words], for keys with a scale per channel. Arguments as in `quantize_pages`; tokens: whole
    pages.

    Transforms are MLX products before the one dispatch, as is a clip of keys, and one of values beyond
        `MAX_RANK`.
    """
    batch, heads, length, _ = pair[0].shape
    tokens = length - start if tokens is None else tokens
    count, at = tokens // TOKENS, layout.keys
    inputs, places = [], []
    for x, transform, rank, limit in zip(pair, transforms, ranks, (1, MAX_RANK), strict=True):
        first = start
        if transform is not None or rank > limit:
            x, first = x[:, :, start : start + tokens], 0
            x = x if transform is None else transform.store(x)
            x = affine.clip_rows(x.astype(mx.float32), rank) if rank > limit else x
        inputs.append(x)
        places += [first, x.shape[2]]
    keys, values = inputs
    units = max(tokens // at.group, -(-count // CHANNEL_SIMDGROUPS)) * batch * heads
    words, headers = launch(
        "quantize_channel",
        [keys, values, ints(count, batch * heads, *places, 0, 0)],
        {
            **{"T_K": keys.dtype, "D_K": at.dims, "T_V": values.dtype, "D_V": layout.values.dims},
            **{"S": CHANNEL_SIMDGROUPS, "RANK_V": ranks[1] if ranks[1] <= MAX_RANK else 1},
            "CHUNK": CHUNK if make is not mx.fast.cuda_kernel else at.blocks + at.blocks % 2,
            **side_template(at, "_K"),
            **side_template(layout.values, "_V"),
        },
        (32 * CHANNEL_SIMDGROUPS * units, 2, 1),
        (32 * CHANNEL_SIMDGROUPS, 1, 1),
        [
            ((batch, heads, count, layout.words), mx.uint32),
            ((batch, heads, tokens // layout.page, layout.header_words), mx.uint32),
        ],
        make,
    )
    return {"records": words, "headers": headers}
