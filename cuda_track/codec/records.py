"""Pack codes and numbers into page records and headers, and read them back, in plain torch ops.

`mlxkv/formats/records.py` says where every bit stands. Sessions and Metal kernels hold pages so; Triton
has an order of its own (`kernels/layout.py`).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn.functional import pad

from cuda_track.codec import mixed_bits, packing, polar, polar_tree
from cuda_track.codec.codec import Codec, Stored
from cuda_track.codec.packing import signed
from mlxkv.formats.records import (
    BLOCK,
    NAMES,
    TOKENS,
    TREE_ANGLES,
    SideLayout,
    code_fields,
    layout_of,
    number_places,
    spans,
)

Field = tuple[int, int, torch.Tensor, torch.Tensor, torch.Tensor]


@lru_cache(maxsize=64)
def _fields(at: SideLayout, device: torch.device) -> list[Field]:
    """(lowest bit, mask, words, codes, shifts) of each field of a record."""
    return [
        (
            field.low,
            (1 << field.width) - 1,
            torch.tensor(field.words, device=device),
            torch.tensor(field.codes, device=device),
            torch.arange(0, 32, field.width, device=device),
        )
        for field in code_fields(at)
    ]


@lru_cache(maxsize=64)
def _numbers(at: SideLayout, device: torch.device) -> torch.Tensor:
    return torch.tensor(number_places(at), device=device)


def pack(codes: torch.Tensor, stored: Stored, at: SideLayout) -> torch.Tensor:
    """Pack one side of pages.

    codes: [..., T, R] unsigned. stored: the float16 numbers of the record, [..., T, groups], by name.
    Returns words, [..., T/16, words].
    """
    codes = pad(codes.long(), (0, at.blocks * BLOCK - codes.shape[-1])).unflatten(-2, (-1, TOKENS))
    flat = pad(codes.flatten(-2), (0, 1))  # behind the last code: 0, where a word has none
    words = flat.new_zeros(*flat.shape[:-1], at.code_words)
    for low, mask, places, of, shifts in _fields(at, codes.device):
        words[..., places] += (((flat >> low) & mask)[..., of] << shifts).sum(-1)
    if not at.numbers:
        return signed(words)
    numbers = [stored[name].unflatten(-2, (-1, TOKENS)) for name in at.numbers]
    numbers = torch.stack(numbers, -3).flatten(-3)[..., _numbers(at, codes.device)]
    return torch.cat([signed(words), numbers.contiguous().view(torch.int32)], -1)


def unpack(words: torch.Tensor, at: SideLayout) -> tuple[torch.Tensor, Stored]:
    """Invert `pack`: [..., N, words] -> codes and numbers."""
    size = TOKENS * at.blocks * BLOCK
    flat = words.new_zeros(*words.shape[:-1], size + 1, dtype=torch.long)
    for low, mask, places, of, shifts in _fields(at, words.device):
        part = (words[..., places, None] >> shifts) & mask
        flat[..., of.flatten()] += part.flatten(-2) << low
    codes = flat[..., :size].unflatten(-1, (TOKENS, -1)).flatten(-3, -2)
    numbers = {}
    if at.numbers:
        halves = words[..., at.code_words :].contiguous().view(torch.float16)
        ordered = torch.empty_like(halves)
        ordered[..., _numbers(at, words.device)] = halves
        ordered = ordered.unflatten(-1, (len(at.numbers), TOKENS, -1))
        numbers = {name: ordered[..., i, :, :].flatten(-3, -2) for i, name in enumerate(at.numbers)}
    return codes[..., : at.dims], numbers


def pack_header(stored: Stored, at: SideLayout) -> torch.Tensor:
    """Pack the numbers that the tokens of a page share, float16 [B, G, P rows, R or R/2].

    Returns [B, G, P, header words].
    """
    numbers = torch.stack([stored[name] for name in at.header_names], -2)
    numbers = pad(numbers, (0, at.header_dims - numbers.shape[-1]))
    return numbers.unflatten(2, (-1, at.header_rows)).flatten(3).contiguous().view(torch.int32)


def unpack_header(words: torch.Tensor, at: SideLayout) -> Stored:
    """Invert `pack_header`."""
    rows, names = at.header_rows, at.header_names
    numbers = words.contiguous().view(torch.float16)
    numbers = numbers.unflatten(-1, (rows, len(names), at.header_dims)).flatten(2, 3)
    numbers = numbers[..., : TREE_ANGLES if at.tree else at.dims]
    return dict(zip(names, numbers.unbind(-2), strict=True))


def to_codes(state: Stored, codecs: tuple[Codec, Codec]) -> dict[str, Stored]:
    """Unpack records [B, G, N, words], and headers if there are any, into the tensors that plain ops read."""
    out = {}
    for (name, at, words, shared), code in zip(spans(layout_of(codecs)), codecs, strict=True):
        codes, numbers = unpack(state["records"][..., words], at)
        numbers = {at.source(number): x for number, x in numbers.items()}
        if at.header_words:
            numbers |= unpack_header(state["headers"][..., shared], at)
        out[name] = _packed(code, codes, numbers, at)
    return out


def to_records(state: dict[str, Stored], codecs: tuple[Codec, Codec]) -> Stored:
    """Invert `to_codes`."""
    words, shared = [], []
    for (name, at, _, _), code in zip(spans(layout_of(codecs)), codecs, strict=True):
        stored = state[name]
        numbers = {number: stored[at.source(number)] for number in at.numbers}
        words.append(pack(_unpacked(code, stored, at), numbers, at))
        if at.header_words:
            shared.append(pack_header(stored, at))
    named = {"records": words, "headers": shared}
    return {name: torch.cat(parts, -1) for name, parts in named.items() if parts}


def as_codes(state: dict, codecs: tuple[Codec, Codec]) -> dict[str, Stored]:
    """Return the quantized pages of a saved cache, records or not, as the tensors that plain ops read.

    Raises KeyError or ValueError for anything else.
    """
    if "records" in state:
        return to_codes(state, codecs)
    for name, code in zip(NAMES, codecs, strict=True):
        if set(state[name]) != code.spec.tensors:
            raise ValueError(f"tensors {', '.join(sorted(state[name]))} for {name}")
    return state


def _unpacked(code: Codec, stored: Stored, at: SideLayout) -> torch.Tensor:
    """Codes [B, G, T, R] of the width of the records."""
    if at.tree:
        return polar_tree.split(stored, at.dims, code.page)
    if at.pairs:
        return polar.split(code.spec, stored["codes"], at.dims)
    if at.raw:
        return stored["values"].contiguous().view(torch.int16).long() & 0xFFFF
    if at.widths:
        return mixed_bits.unpack(code.spec, stored["codes"])
    return packing.unpack(stored["codes"], at.bits, at.dims)


def _packed(code: Codec, codes: torch.Tensor, numbers: Stored, at: SideLayout) -> Stored:
    """Invert `_unpacked`; numbers: by the names of stored tensors."""
    if at.tree:
        return numbers | polar_tree.join(codes, numbers["radii"])
    if at.pairs:
        return numbers | {"codes": polar.join(code.spec, codes)}
    if at.raw:
        return {"values": codes.to(torch.int16).contiguous().view(torch.float16)}
    if at.widths:
        return numbers | {"codes": mixed_bits.pack(code.spec, codes)}
    return numbers | {"codes": packing.pack(codes, at.bits)}
