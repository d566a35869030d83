"""Pack codes and numbers into page records and headers, and read them back, in plain MLX ops.

`mlxkv/formats/records.py` describes the order in memory. Used to save, load and trim pages without kernels, and to
test kernels.
"""

from __future__ import annotations

from functools import lru_cache, reduce
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxkv.codec.codec import Codec, Stored
from mlxkv.formats.layout import BLOCK, TOKENS, TREE_ANGLES, SideLayout
from mlxkv.formats.records import code_fields, layout_of, number_places, spans


class _Places(NamedTuple):
    """Places of a side's codes and numbers: `code_fields` and `number_places` as indices for MLX.

    fields: per field, its lowest bit, its mask, the codes of each of its words and their shifts. words: [words, n],
        indices into the concatenated words of all fields that make up each word of a record; the index past the end
        is 0.
    codes: per field, the word, shift and mask of every code; mask 0 for codes without bits in the field.
    numbers, back: order of the numbers in memory, and its inverse.
    """

    fields: list[tuple[int, int, mx.array, mx.array]]
    words: mx.array
    codes: list[tuple[mx.array, mx.array, mx.array]]
    numbers: mx.array
    back: mx.array


def _index(x: np.ndarray) -> mx.array:
    return mx.array(x.astype(np.uint32))


@lru_cache(maxsize=64)
def _places(at: SideLayout) -> _Places:
    size = TOKENS * at.blocks * BLOCK
    fields: list[tuple[int, int, mx.array, mx.array]] = []
    codes: list[tuple[mx.array, mx.array, mx.array]] = []
    for field in code_fields(at):
        mask, shifts = (1 << field.width) - 1, np.arange(0, 32, field.width)
        fields.append((field.low, mask << field.low, _index(field.codes), _index(shifts)))
        word, shift, masks = np.zeros((3, size + 1), np.int64)  # extra entry: slots without a code
        word[field.codes] = field.words[:, None]
        shift[field.codes], masks[field.codes] = shifts, mask
        codes.append((_index(word[:size]), _index(shift[:size]), _index(masks[:size])))
    parts = np.concatenate([field.words for field in code_fields(at)])
    order = np.argsort(parts, kind="stable")
    counts = np.bincount(parts, minlength=at.code_words)
    words = np.full((at.code_words, counts.max()), len(parts))
    words[np.arange(counts.max()) < counts[:, None]] = order
    numbers = number_places(at) if at.numbers else np.zeros(0)
    return _Places(fields, _index(words), codes, _index(numbers), _index(np.argsort(numbers)))


def pack(codes: mx.array, stored: Stored, at: SideLayout) -> mx.array:
    """Pack one side of pages.

    codes: [..., T, R] unsigned. stored: float16 numbers of the record by name, [..., T, groups].
    Returns words, [..., T/16, words].
    """
    (*lead, tokens, dims), places = codes.shape, _places(at)
    shape = *lead, tokens // TOKENS
    codes = _padded(codes.astype(mx.uint32), at.blocks * BLOCK - dims)
    flat = _across(_padded(mx.reshape(codes, (*shape, -1)), 1))  # 0 after the last code
    bits = [
        ((flat[of] & mask) >> low << shifts[:, None]).sum(1)
        for low, mask, of, shifts in places.fields
    ]
    words = mx.concatenate([*bits, mx.zeros_like(bits[0][:1])])[places.words].sum(1)
    words = mx.reshape(words.swapaxes(0, 1), (*shape, -1))
    if not at.numbers:
        return words
    numbers = mx.stack([mx.reshape(stored[n], (*shape, -1)) for n in at.numbers], -2)
    numbers = mx.take(mx.reshape(numbers, (*shape, -1)), places.numbers, axis=-1)
    return mx.concatenate([words, mx.contiguous(numbers).view(mx.uint32)], -1)


def _across(x: mx.array) -> mx.array:
    """Reshape [..., n] to [n, all others]: MLX gathers whole rows faster than single numbers."""
    return mx.contiguous(mx.reshape(x, (-1, x.shape[-1])).swapaxes(0, 1))


def unpack(words: mx.array, at: SideLayout) -> tuple[mx.array, Stored]:
    """Invert `pack`: codes and numbers of [..., N, words]."""
    (*lead, records, _), places = words.shape, _places(at)
    across = _across(words[..., : at.code_words])
    parts = (
        ((across[word] >> shift[:, None]) & mask[:, None]) << low
        for (low, *_), (word, shift, mask) in zip(places.fields, places.codes, strict=True)
    )
    codes = reduce(mx.bitwise_or, parts).swapaxes(0, 1)
    codes = mx.reshape(codes, (*lead, records * TOKENS, at.blocks * BLOCK))[..., : at.dims]
    if not at.numbers:
        return codes, {}
    numbers = mx.contiguous(words[..., at.code_words :]).view(mx.float16)
    numbers = mx.take(numbers, places.back, axis=-1)
    numbers = mx.reshape(numbers, (*lead, records, len(at.numbers), TOKENS, at.groups))
    shape = *lead, records * TOKENS, at.groups
    stored = {n: numbers[..., i, :, :] for i, n in enumerate(at.numbers)}
    return codes, {name: mx.reshape(x, shape) for name, x in stored.items()}


def pack_header(stored: Stored, at: SideLayout) -> mx.array:
    """Pack the numbers shared by the tokens of a page, float16 [B, G, P rows, R or R/2].

    Returns [B, G, P, header words].
    """
    rows = at.header_rows
    parts = [
        mx.reshape(x, (*x.shape[:2], -1, rows, x.shape[3]))
        for x in (stored[name] for name in at.header_names)
    ]
    x = mx.stack(parts, -2)  # [B, G, P, rows, names, R]
    x = _padded(x, at.header_dims - x.shape[-1])
    return mx.contiguous(mx.reshape(x, (*x.shape[:3], -1))).view(mx.uint32)


def unpack_header(words: mx.array, at: SideLayout) -> Stored:
    """Invert `pack_header`."""
    batch, heads, pages, _ = words.shape
    rows, names = at.header_rows, at.header_names
    x = mx.reshape(
        mx.contiguous(words).view(mx.float16),
        (batch, heads, pages * rows, len(names), at.header_dims),
    )
    x = x[..., : TREE_ANGLES if at.tree else at.dims]
    return {name: x[..., i, :] for i, name in enumerate(names)}


def to_codes(state: Stored, codecs: tuple[Codec, Codec]) -> dict[str, Stored]:
    """Convert records [B, G, N, words], and any headers, to the tensors that plain ops read."""
    out: dict[str, Stored] = {}
    for (name, at, words, shared), code in zip(spans(layout_of(codecs)), codecs, strict=True):
        codes, numbers = unpack(state["records"][..., words], at)
        if at.header_words:
            numbers |= unpack_header(state["headers"][..., shared], at)
        out[name] = code.join(codes, numbers)
    return out


def to_records(state: dict[str, Stored], codecs: tuple[Codec, Codec]) -> Stored:
    """Invert `to_codes`."""
    words: list[mx.array] = []
    shared: list[mx.array] = []
    for (name, at, _, _), code in zip(spans(layout_of(codecs)), codecs, strict=True):
        codes, numbers = code.split(state[name])
        words.append(pack(codes, numbers, at))
        if at.header_words:
            shared.append(pack_header(numbers, at))
    out = {"records": mx.concatenate(words, -1)}
    return {**out, "headers": mx.concatenate(shared, -1)} if shared else out


def _padded(x: mx.array, count: int) -> mx.array:
    """Append `count` zeros to the last axis; skip `mx.pad` for 0, where it would still copy."""
    return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count)]) if count else x
