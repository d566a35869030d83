"""Pages as plain ops store them <-> as records hold them: the same codes and numbers, in another order."""

from __future__ import annotations

import mlx.core as mx

from mlxkv import headers, packing, records
from mlxkv.codec import Codec, Stored
from mlxkv.kernels import RecordLayout
from mlxkv.quantizers import polar, polar_tree
from mlxkv.records import SideLayout

NAMES = ("keys", "values")


def to_codes(state: Stored, codecs: tuple[Codec, Codec], layout: RecordLayout) -> dict[str, Stored]:
    """Records [B, G, N, words], and headers if there are any -> the arrays that plain ops read."""
    out, start, shared = {}, 0, 0
    for name, code, at in zip(NAMES, codecs, (layout.keys, layout.values), strict=True):
        codes, numbers = records.unpack(state["records"][..., start : start + at.words], at)
        if at.header_words:
            words = state["headers"][..., shared : shared + at.header_words]
            numbers |= headers.unpack(words, at)
        out[name] = _joined(code, codes, numbers, at)
        start, shared = start + at.words, shared + at.header_words
    return out


def to_records(
    state: dict[str, Stored], codecs: tuple[Codec, Codec], layout: RecordLayout
) -> Stored:
    """The inverse of `to_codes`."""
    words, shared = [], []
    for name, code, at in zip(NAMES, codecs, (layout.keys, layout.values), strict=True):
        codes, numbers = _split(code, state[name], at)
        words.append(records.pack(codes, numbers, at))
        if at.header_words:
            shared.append(headers.pack(numbers, at))
    out = {"records": mx.concatenate(words, axis=-1)}
    return {**out, "headers": mx.concatenate(shared, axis=-1)} if shared else out


def _split(code: Codec, stored: Stored, at: SideLayout) -> tuple[mx.array, Stored]:
    """What is stored -> codes [B, G, T, R] of the width of the records, and the other numbers."""
    if at.tree:
        codes = polar_tree.split(stored, at.dims, code.page)
        return codes, {**stored, "scale": stored["radii"]}
    if at.pairs:
        return polar.split(code.spec, stored["codes"], at.dims), stored
    if at.raw:
        return mx.contiguous(stored["values"]).view(mx.uint16), {}
    codes = packing.unpack(stored["codes"], at.bits - at.signs, at.dims)
    if at.signs:
        signs = packing.unpack(stored["signs"], 1, at.dims)
        return codes + (signs << (at.bits - 1)), {**stored, "bias": stored["length"]}
    return codes, stored


def _joined(code: Codec, codes: mx.array, numbers: Stored, at: SideLayout) -> Stored:
    """The inverse of `_split`."""
    if at.tree:
        radii = numbers.pop("scale")
        return {**polar_tree.join(codes, radii), **numbers}
    if at.pairs:
        return {"codes": polar.join(code.spec, codes), **numbers}
    if at.raw:
        return {"values": mx.contiguous(codes.astype(mx.uint16)).view(mx.float16)}
    if at.signs:
        low = packing.pack(codes & (2 ** (at.bits - 1) - 1), at.bits - 1)
        signs, length = packing.pack(codes >> (at.bits - 1), 1), numbers.pop("bias")
        return {"codes": low, "signs": signs, "length": length, **numbers}
    return {"codes": packing.pack(codes, at.bits), **numbers}
