"""Pages whose keys have a scale per channel, sealed by a kernel. Plain-ops twin: `quantizers.affine.encode`
of both sides and `exchange.to_records`."""

from __future__ import annotations

import mlx.core as mx

from mlxkv import records
from mlxkv.kernels import MAX_RANK, RecordLayout, ints, side_template
from mlxkv.metal.launch import Factory, launch
from mlxkv.quantizers import affine
from mlxkv.transform import Transform

SIMDGROUPS = 8
# Blocks of dims that fit in an Apple GPU's 128 registers; on NVIDIA all do, and seal faster.
CHUNK = 2
MAX_DIMS = 256  # of keys: ranges of all channels, from every simdgroup, fit in threadgroup memory


def why_not(layout: RecordLayout) -> str | None:
    """Why the kernel does not write such records, or None."""
    keys, values = layout.keys, layout.values
    if not keys.channel or keys.outer or keys.pairs:
        return "keys without scales per channel alone"
    if values.header_words or values.codebook or values.tree or values.raw:
        return "values that are not min-max or abs-max codes per token"
    if keys.dims > MAX_DIMS:
        return f"ranges of {keys.dims} channels do not fit in threadgroup memory"
    return None


def seal(
    pair: tuple[mx.array, mx.array],
    layout: RecordLayout,
    make: Factory,
    transforms: tuple[Transform | None, Transform | None] = (None, None),
    start: int = 0,
    tokens: int | None = None,
    ranks: tuple[int, int] = (1, 1),
) -> dict[str, mx.array]:
    """(keys, values), each [B, G, T, D] -> records [B, G, tokens / 16, words] and headers
    [B, G, pages, header words]; the arguments: `kernels.seal`. tokens: whole pages.

    Transforms are MLX products before the one dispatch, as is a clip of keys, and one of values beyond
        `MAX_RANK`.
    """
    batch, heads, length, _ = pair[0].shape
    tokens = length - start if tokens is None else tokens
    count, at = tokens // records.TOKENS, layout.keys
    inputs, places = [], []
    for x, transform, rank, most in zip(pair, transforms, ranks, (1, MAX_RANK), strict=True):
        first = start
        if transform is not None or rank > most:
            x, first = x[:, :, start : start + tokens], 0
            x = x if transform is None else transform.store(x)
            x = affine.clip_rows(x.astype(mx.float32), rank) if rank > most else x
        inputs.append(x)
        places += [first, x.shape[2]]
    keys, values = inputs
    units = max(tokens // at.group, -(-count // SIMDGROUPS)) * batch * heads
    words, headers = launch(
        "seal_channel",
        [keys, values, ints(count, batch * heads, *places, 0, 0)],
        {
            **{"T_K": keys.dtype, "D_K": at.dims, "T_V": values.dtype, "D_V": layout.values.dims},
            **{"S": SIMDGROUPS, "RANK_V": ranks[1] if ranks[1] <= MAX_RANK else 1},
            "CHUNK": CHUNK if make is not mx.fast.cuda_kernel else at.blocks + at.blocks % 2,
            **side_template(at, "_K"),
            **side_template(layout.values, "_V"),
        },
        (32 * SIMDGROUPS * units, 2, 1),
        (32 * SIMDGROUPS, 1, 1),
        [
            ((batch, heads, count, layout.words), mx.uint32),
            ((batch, heads, tokens // layout.page, layout.header_words), mx.uint32),
        ],
        make,
    )
    return {"records": words, "headers": headers}
