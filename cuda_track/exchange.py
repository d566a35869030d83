"""Pages as plain ops store them <-> as records hold them: the same codes and numbers, in another order."""

from __future__ import annotations

import torch

from cuda_track import headers, packing, records
from cuda_track.codec import Codec, Stored
from cuda_track.quantizers import polar, polar_tree
from cuda_track.records import SideLayout

NAMES = ("keys", "values")


def layouts(codecs: tuple[Codec, Codec]) -> tuple[SideLayout, SideLayout]:
    """Of keys and of values, for formats that have records (`records.why_not`)."""
    keys, values = codecs
    return (
        records.layout(keys.spec, keys.dims, keys.page, True),
        records.layout(values.spec, values.dims, values.page, False),
    )


def to_codes(state: Stored, codecs: tuple[Codec, Codec]) -> dict[str, Stored]:
    """Records [B, G, N, words], and headers if there are any -> the tensors that plain ops read."""
    out, start, shared = {}, 0, 0
    for name, code, at in zip(NAMES, codecs, layouts(codecs), strict=True):
        codes, numbers = records.unpack(state["records"][..., start : start + at.words], at)
        if at.header_words:
            words = state["headers"][..., shared : shared + at.header_words]
            numbers |= headers.unpack(words, at)
        out[name] = _joined(code, codes, numbers, at)
        start, shared = start + at.words, shared + at.header_words
    return out


def to_records(state: dict[str, Stored], codecs: tuple[Codec, Codec]) -> Stored:
    """The inverse of `to_codes`."""
    words, shared = [], []
    for name, code, at in zip(NAMES, codecs, layouts(codecs), strict=True):
        codes, numbers = _split(code, state[name], at)
        words.append(records.pack(codes, numbers, at))
        if at.header_words:
            shared.append(headers.pack(numbers, at))
    out = {"records": torch.cat(words, -1)}
    return {**out, "headers": torch.cat(shared, -1)} if shared else out


def _split(code: Codec, stored: Stored, at: SideLayout) -> tuple[torch.Tensor, Stored]:
    """What is stored -> codes [B, G, T, R] of the width of the records, and the other numbers."""
    if at.tree:
        codes = polar_tree.split(stored, at.dims, code.page)
        return codes, {**stored, "scale": stored["radii"]}
    if at.pairs:
        return polar.split(code.spec, stored["codes"], at.dims), stored
    codes = packing.unpack(stored["codes"], at.bits - at.signs, at.dims)
    if at.signs:
        signs = packing.unpack(stored["signs"], 1, at.dims)
        return codes + (signs << (at.bits - 1)), {**stored, "bias": stored["length"]}
    return codes, stored


def _joined(code: Codec, codes: torch.Tensor, numbers: Stored, at: SideLayout) -> Stored:
    """The inverse of `_split`."""
    if at.tree:
        radii = numbers.pop("scale")
        return {**polar_tree.join(codes, radii), **numbers}
    if at.pairs:
        return {"codes": polar.join(code.spec, codes), **numbers}
    if at.signs:
        low = packing.pack(codes & (2 ** (at.bits - 1) - 1), at.bits - 1)
        signs, length = packing.pack(codes >> (at.bits - 1), 1), numbers.pop("bias")
        return {"codes": low, "signs": signs, "length": length, **numbers}
    return {"codes": packing.pack(codes, at.bits), **numbers}
