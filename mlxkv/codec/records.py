"""Pack codes and numbers into page records and headers, and read them back, in plain MLX ops.

The order in memory is described in `mlxkv/formats/records.py`. Used to save, load and trim pages without a
kernel, and to check the kernels.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from mlxkv.codec import fill, packing, polar, polar_tree
from mlxkv.codec.codec import Codec, Stored
from mlxkv.formats.records import (
    BLOCK,
    HALF,
    LANES,
    NAMES,
    TOKENS,
    TREE_ANGLES,
    Order,
    SideLayout,
    code_fields,
    code_order,
    layout_of,
    number_order,
    value_orders,
    vector,
)


def pack(codes: mx.array, stored: Stored, at: SideLayout) -> mx.array:
    """Pack one side of pages.

    codes: [..., T, R] unsigned. stored: the float16 numbers of the record, [..., T, groups], by name.
    Returns words, [..., T/16, words].
    """
    *lead, tokens, dims = codes.shape
    records = tokens // TOKENS
    codes = _padded(codes.astype(mx.uint32), at.blocks * BLOCK - dims)
    codes = codes.reshape(*lead, records, TOKENS, at.blocks * BLOCK)
    if at.widths:
        words = _block_words(codes, at)
    else:
        words = _vectors(_words(_to_memory(codes, code_order(at)), at), at)
    parts = [words.reshape(*lead, records, at.code_words)]
    shape = (*lead, records, TOKENS, at.groups)
    numbers = [stored[name].reshape(shape) for name in at.numbers]
    return mx.concatenate([*parts, *_pack_numbers(numbers, at)], -1)


def unpack(words: mx.array, at: SideLayout) -> tuple[mx.array, Stored]:
    """Invert `pack`: [..., N, words] -> codes and numbers."""
    *lead, records, _ = words.shape
    if at.widths:
        codes = _from_block_words(words[..., : at.code_words], at)
    else:
        slots = _from_words(_from_vectors(words[..., : at.code_words], at), at)
        codes = _from_memory(slots, code_order(at))
    codes = codes.reshape(*lead, records * TOKENS, at.blocks * BLOCK)
    shape, numbers = (*lead, records * TOKENS, at.groups), []
    if at.numbers:
        numbers = _unpack_numbers(mx.contiguous(words[..., at.code_words :]).view(mx.float16), at)
    numbers = {name: x.reshape(shape) for name, x in zip(at.numbers, numbers, strict=True)}
    return codes[..., : at.dims], numbers


def pack_header(stored: Stored, at: SideLayout) -> mx.array:
    """Pack the numbers that the tokens of a page share, float16 [B, G, P rows, R or R/2].

    Returns [B, G, P, header words].
    """
    rows = at.header_rows
    parts = [
        x.reshape(*x.shape[:2], -1, rows, x.shape[3])
        for x in (stored[name] for name in at.header_names)
    ]
    x = mx.stack(parts, -2)  # [B, G, P, rows, names, R]
    x = _padded(x, at.header_dims - x.shape[-1])
    return mx.contiguous(x.reshape(*x.shape[:3], -1)).view(mx.uint32)


def unpack_header(words: mx.array, at: SideLayout) -> Stored:
    """Invert `pack_header`."""
    batch, heads, pages, _ = words.shape
    rows, names = at.header_rows, at.header_names
    x = (
        mx.contiguous(words)
        .view(mx.float16)
        .reshape(batch, heads, pages * rows, len(names), at.header_dims)
    )
    x = x[..., : TREE_ANGLES if at.tree else at.dims]
    return {name: x[..., i, :] for i, name in enumerate(names)}


def to_codes(state: Stored, codecs: tuple[Codec, Codec]) -> dict[str, Stored]:
    """Records [B, G, N, words], and headers if there are any -> the tensors that plain ops read."""
    layout, out, start, shared = layout_of(codecs), {}, 0, 0
    for name, code, at in zip(NAMES, codecs, (layout.keys, layout.values), strict=True):
        codes, numbers = unpack(state["records"][..., start : start + at.words], at)
        if at.header_words:
            words = state["headers"][..., shared : shared + at.header_words]
            numbers |= unpack_header(words, at)
        out[name] = _joined(code, codes, numbers, at)
        start, shared = start + at.words, shared + at.header_words
    return out


def to_records(state: dict[str, Stored], codecs: tuple[Codec, Codec]) -> Stored:
    """Invert `to_codes`."""
    layout, words, shared = layout_of(codecs), [], []
    for name, code, at in zip(NAMES, codecs, (layout.keys, layout.values), strict=True):
        codes, numbers = _split(code, state[name], at)
        words.append(pack(codes, numbers, at))
        if at.header_words:
            shared.append(pack_header(numbers, at))
    out = {"records": mx.concatenate(words, -1)}
    return {**out, "headers": mx.concatenate(shared, -1)} if shared else out


def _split(code: Codec, stored: Stored, at: SideLayout) -> tuple[mx.array, Stored]:
    """Return what is stored -> codes [B, G, T, R] of the width of the records, and the other numbers."""
    if at.tree:
        codes = polar_tree.split(stored, at.dims, code.page)
        return codes, {**stored, "scale": stored["radii"]}
    if at.pairs:
        return polar.split(code.spec, stored["codes"], at.dims), stored
    if at.raw:
        return mx.contiguous(stored["values"]).view(mx.uint16), {}
    if at.widths:
        return fill.unpacked(code.spec, stored["codes"]), stored
    return packing.unpack(stored["codes"], at.bits, at.dims), stored


def _joined(code: Codec, codes: mx.array, numbers: Stored, at: SideLayout) -> Stored:
    """Invert `_split`."""
    if at.tree:
        radii = numbers.pop("scale")
        return {**polar_tree.join(codes, radii), **numbers}
    if at.pairs:
        return {"codes": polar.join(code.spec, codes), **numbers}
    if at.raw:
        return {"values": mx.contiguous(codes.astype(mx.uint16)).view(mx.float16)}
    if at.widths:
        return {"codes": fill.packed(code.spec, codes), **numbers}
    return {"codes": packing.pack(codes, at.bits), **numbers}


def _pack_numbers(numbers: list[mx.array], at: SideLayout) -> list[mx.array]:
    """[..., 16, groups] scales and biases -> words in memory order."""
    if not numbers:
        return []
    lead = numbers[0].shape[:-2]
    if at.keys:
        moved = [_to_memory(mx.stack(numbers, -3), number_order(at), 3)]
    else:
        pairs = zip(numbers, value_orders(at), strict=True)
        moved = [_to_memory(x, order) for x, order in pairs]
    return [mx.contiguous(x.reshape(*lead, -1)).view(mx.uint32) for x in moved]


def _unpack_numbers(numbers: mx.array, at: SideLayout) -> list[mx.array]:
    """Invert `_pack_numbers`, of float16 numbers."""
    lead = numbers.shape[:-1]
    if at.keys:
        order = number_order(at)
        x = _from_memory(numbers.reshape(*lead, *order.in_memory), order)
        return [x[..., i, :, :, :] for i in range(len(at.numbers))]
    size, out = TOKENS * at.groups, []
    for i, order in enumerate(value_orders(at)):
        part = numbers[..., size * i : size * (i + 1)].reshape(*lead, *order.in_memory)
        out.append(_from_memory(part, order))
    return out


def _to_memory(x: mx.array, order: Order, axes: int = 2) -> mx.array:
    """The last `axes` axes of x, parted as `order.axes` says and moved into memory order."""
    lead = x.shape[: x.ndim - axes]
    return _moved(x.reshape(*lead, *order.axes), order.memory)


def _from_memory(x: mx.array, order: Order) -> mx.array:
    """Axes in memory order -> `order.axes`."""
    return _moved(x, order.back)


def _moved(x: mx.array, order: tuple[int, ...]) -> mx.array:
    n = x.ndim - len(order)
    return x.transpose(*range(n), *(n + i for i in order))


def _padded(x: mx.array, count: int) -> mx.array:
    """Zeros behind the last axis: MLX copies where `count` is 0, too, so do not ask it."""
    return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count)]) if count else x


def _sum_bits(x: mx.array, step: int) -> mx.array:
    """[..., n, half] codes -> [...] words: entry i of a half at bit `step` * i."""
    shift = mx.arange(x.shape[-2], dtype=mx.uint32)[:, None] * step
    shift = shift + mx.array([0, 16], dtype=mx.uint32)
    return (x << shift).sum((-1, -2))


def _take_bits(words: mx.array, count: int, step: int, mask: int) -> mx.array:
    """The inverse of `_sum_bits`."""
    shift = mx.arange(count, dtype=mx.uint32)[:, None] * step
    shift = shift + mx.array([0, 16], dtype=mx.uint32)
    return (words[..., None, None] >> shift) & mask


def _words(slots: mx.array, at: SideLayout) -> mx.array:
    """[..., g, t, j, r, p, half] -> [..., lane, m]."""
    lead = slots.shape[:-6]
    x = slots.reshape(*lead, LANES, at.blocks, 2, 4, 2)
    if at.bits == 4:
        return _sum_bits(x, 4).reshape(*lead, LANES, -1)
    if at.bits == 8:
        x = x.reshape(*lead, LANES, at.blocks, 2, 2, 2, 2)  # p = (word, byte)
        return _sum_bits(x, 8).reshape(*lead, LANES, -1)
    if at.raw:
        return _sum_bits(x[..., None, :], HALF).reshape(*lead, LANES, -1)
    x = x.reshape(*lead, LANES, at.blocks, 8, 2)
    if at.bits == 2:
        return _sum_bits(x, 2)
    if at.blocks % 2:
        x = mx.pad(x, [(0, 0)] * (x.ndim - 3) + [(0, 1), (0, 0), (0, 0)])
    pairs = x.reshape(*lead, LANES, -1, 2, 8, 2)
    low = _sum_bits(pairs & 3, 2)  # [..., pair, 2]
    high = _sum_bits((pairs >> 2).reshape(*lead, LANES, -1, 16, 2), 1)
    return mx.concatenate([low, high[..., None]], -1).reshape(*lead, LANES, -1)


def _from_words(words: mx.array, at: SideLayout) -> mx.array:
    lead = words.shape[:-2]
    if at.bits == 4:
        x = _take_bits(words, 4, 4, 15)
    elif at.bits == 8:
        x = _take_bits(words, 2, 8, 255)
    elif at.raw:
        x = _take_bits(words, 1, HALF, 0xFFFF)
    elif at.bits == 2:
        x = _take_bits(words, 8, 2, 3)
    else:
        pairs = words.reshape(*lead, LANES, -1, 3)
        low = _take_bits(pairs[..., :2], 8, 2, 3)
        high = _take_bits(pairs[..., 2], 16, 1, 1).reshape(low.shape)
        x = (low | (high << 2)).reshape(*lead, LANES, -1, 8, 2)[..., : at.blocks, :, :]
    return x.reshape(*lead, 8, 4, at.blocks, 2, 4, 2)


@lru_cache(maxsize=64)
def _places(at: SideLayout) -> list[tuple[int, int, mx.array, mx.array, mx.array]]:
    """(lowest bit, mask, words, codes, shifts) of each field of a side whose bits differ by block."""
    return [
        (
            *(field.low, (1 << field.width) - 1),
            *(mx.array(x.astype("uint32")) for x in (field.words, field.codes)),
            mx.arange(0, 32, field.width, dtype=mx.uint32),
        )
        for field in code_fields(at)
    ]


def _block_words(codes: mx.array, at: SideLayout) -> mx.array:
    """[..., 16, padded dims] -> [..., words]."""
    flat = _padded(codes.reshape(*codes.shape[:-2], -1), 1)  # behind the last code: 0
    words = mx.zeros((*flat.shape[:-1], at.code_words), mx.uint32)
    for low, mask, places, of, shifts in _places(at):
        bits = (mx.take(flat >> low, of, axis=-1) & mask) << shifts
        words = words.at[..., places].add(bits.sum(-1))
    return words


def _from_block_words(words: mx.array, at: SideLayout) -> mx.array:
    """Invert `_block_words`."""
    size = TOKENS * at.blocks * BLOCK
    flat = mx.zeros((*words.shape[:-1], size + 1), mx.uint32)
    for low, mask, places, of, shifts in _places(at):
        bits = (mx.take(words, places, axis=-1)[..., None] >> shifts) & mask
        flat = flat.at[..., of.reshape(-1)].add(bits.reshape(*bits.shape[:-2], -1) << low)
    return flat[..., :size]


def _vectors(words: mx.array, at: SideLayout) -> mx.array:
    """[..., lane, m] -> the order in memory: vectors of v words, lane by lane."""
    v = vector(at.lane_words)
    x = words.reshape(*words.shape[:-2], LANES, at.lane_words // v, v)
    return x.swapaxes(-2, -3)


def _from_vectors(words: mx.array, at: SideLayout) -> mx.array:
    v = vector(at.lane_words)
    x = words.reshape(*words.shape[:-1], at.lane_words // v, LANES, v)
    return x.swapaxes(-2, -3).reshape(*words.shape[:-1], LANES, at.lane_words)
