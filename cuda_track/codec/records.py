"""Read codes and numbers out of page records and headers, in plain torch ops.

`mlxkv/formats/records.py` says where every bit stands. Sessions of mlxkv hold pages so; Triton has an order of its own
(`kernels/layout.py`).
"""

from __future__ import annotations

from functools import lru_cache

import torch

from cuda_track.codec.codec import Codec, Stored
from mlxkv.formats.layout import BLOCK, TOKENS, TREE_ANGLES, SideLayout
from mlxkv.formats.records import NAMES, code_fields, layout_of, number_places, spans

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


def unpack(words: torch.Tensor, at: SideLayout) -> tuple[torch.Tensor, Stored]:
    """Read one side of pages: words [..., N, words] -> codes [..., T, R], unsigned, and the float16 numbers of the
    records, [..., T, groups], by name."""
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


def unpack_header(words: torch.Tensor, at: SideLayout) -> Stored:
    """Read the numbers that the tokens of a page share: words [B, G, P, header words] -> float16 [B, G, P rows, R or
    R/2] by name."""
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
        if at.header_words:
            numbers |= unpack_header(state["headers"][..., shared], at)
        out[name] = code.join(codes, numbers)
    return out


def as_codes(state: dict, codecs: tuple[Codec, Codec]) -> dict[str, Stored]:
    """Return the quantized pages of a saved cache, records or not, as the tensors that plain ops read.

    Raises KeyError or ValueError for anything else.
    """
    if "records" in state:
        return to_codes(state, codecs)
    for name, code in zip(NAMES, codecs, strict=True):
        if set(state[name]) != code.quantizer.tensors:
            raise ValueError(f"tensors {', '.join(sorted(state[name]))} for {name}")
    return state
