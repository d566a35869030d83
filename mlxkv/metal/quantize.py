"""Encode keys and values into page records by kernels. Plain-ops twins: `encode` of the methods in `codec`, and
`codec.records.to_records`.

`builder` builds the kernels (`launch`); tests pass the emulator's.
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
from mlxkv.metal.launch import KernelBuilder, launch
from mlxkv.metal.template import (
    Pair,
    ints,
    mixed_bits_quantizing,
    nothing,
    quantizing_template,
    side_template,
)

SIMDGROUPS = 4  # per threadgroup
# pairs of floats in the threadgroup memory of a quantizing dispatch: 16 KiB, or one tile
TILES = 2048
# Target resident threadgroups per NVIDIA multiprocessor, by pairs per tile: enough simdgroups to hide memory latency,
# with few registers spilled (as the compiler reports, not tuned by timing).
RESIDENT = {512: 8, 1024: 10, 2048: 12}
MAX_RANK = 64  # largest clip rank the kernels select: the longest list of text/quantize/select.h
FAST_DIMS = (64, 128, 256, 512)
FAST_KINDS = {"hadamard": 1, "srft": 2, SCALED: 4}
DENSE, DENSE_DIMS, DENSE_TOKENS = 3, (64, 96, 128, 192, 256), 512
CHANNEL_SIMDGROUPS = 8
# Blocks of dims that fit in an Apple GPU's 128 registers; on NVIDIA all fit, which is faster.
CHUNK = 2
CHANNEL_DIMS = (
    256  # largest for keys: ranges of all channels, per simdgroup, fit in threadgroup memory
)


def record_writer(layout: RecordLayout) -> Callable[..., dict[str, mx.array]] | None:
    """Return the function that quantizes pages of this layout, called as `quantize_pages`; None: use plain ops."""
    if why_no_channels(layout) is None:
        return quantize_channels
    return _quantize_records if layout.quantized_by_kernel else None


def clip_ranks(codecs: tuple[Codec, Codec], dims: tuple[int, int]) -> tuple[int, int]:
    """Return the `ranks` of `quantize_pages` for keys and values with these stored dims."""
    keys, values = (code.quantizer.clip_rank(n) for code, n in zip(codecs, dims, strict=True))
    return keys, values


def _quantize_records(*arguments) -> dict[str, mx.array]:
    return {"records": quantize_pages(*arguments)}


def quantize_pages(
    pair: Pair,
    layout: RecordLayout,
    builder: KernelBuilder,
    transforms: tuple[Transform | None, Transform | None] = (None, None),
    start: int = 0,
    tokens: int | None = None,
    ranks: tuple[int, int] = (1, 1),
) -> mx.array:
    """Encode (keys, values), each [B, G, T, D], into records [B, G, tokens / 16, words], in one dispatch.

    Keys and values may differ in D, dtype, format and transform.

    start, tokens: range to encode, all tokens by default; a multiple of 16. Pass whole buffers, since MLX copies
        slices.
    transforms: of keys and values. Those that the kernel cannot apply (`quantize_kind`) are applied by an MLX product
        before the dispatch.
    ranks: `Affine.clip_rank` of keys and values. Beyond `MAX_RANK` MLX clips before the dispatch.
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
            assert table is not None  # every fast form has a table
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
        builder,
        f"{32 * groups}, {RESIDENT[tile]}" if tile in RESIDENT else "",
    )
    return out


def fast_kind(transform: Transform | None, dims: int) -> int | None:
    """Return how the quantize kernel applies a transform, None if it cannot.

    0: no transform, 1: Hadamard butterflies, 2: Fourier butterflies, 4: Fourier butterflies and scales.
    """
    if transform is None:
        return 0
    return FAST_KINDS.get(transform.kind) if dims in FAST_DIMS else None


def quantize_kind(transform: Transform | None, dims: int, tokens: int) -> int | None:
    """Return `fast_kind`, or DENSE for a square matrix and few tokens, where the number of dispatches dominates.

    For many tokens a matrix is applied by MLX's product, on matrix units if the GPU has them.
    """
    kind = fast_kind(transform, dims)
    if kind is None and transform is not None and tokens <= DENSE_TOKENS and dims in DENSE_DIMS:
        by_sequence = transform.down.ndim > 3  # one per sequence
        return DENSE if transform.down.shape[-2:] == (dims, dims) and not by_sequence else None
    return kind


def why_no_channels(layout: RecordLayout) -> str | None:
    """Return why `quantize_channels` cannot write such records, or None."""
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
    builder: KernelBuilder,
    transforms: tuple[Transform | None, Transform | None] = (None, None),
    start: int = 0,
    tokens: int | None = None,
    ranks: tuple[int, int] = (1, 1),
) -> dict[str, mx.array]:
    """Encode (keys, values), each [B, G, T, D], with key scales per channel.

    Returns records [B, G, tokens / 16, words] and headers [B, G, pages, header words]. Arguments as in
    `quantize_pages`; tokens: whole pages.

    MLX applies transforms before the single dispatch, clips keys, and clips values beyond `MAX_RANK`.
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
            "CHUNK": CHUNK if builder is not mx.fast.cuda_kernel else at.blocks + at.blocks % 2,
            **side_template(at, "_K"),
            **side_template(layout.values, "_V"),
        },
        (32 * CHANNEL_SIMDGROUPS * units, 2, 1),
        (32 * CHANNEL_SIMDGROUPS, 1, 1),
        [
            ((batch, heads, count, layout.words), mx.uint32),
            ((batch, heads, tokens // layout.page, layout.header_words), mx.uint32),
        ],
        builder,
    )
    return {"records": words, "headers": headers}
