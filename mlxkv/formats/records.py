"""Describe page records: the physical order of codes and scales that the kernels read and files hold.

A record holds 16 tokens of one kv head, keys and values together, as uint32 words. `metal/text/codes.h`
explains the order in memory; `code_fields` and `number_places` are the only other description. Both tracks pack and
unpack by them (`codec/records.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from mlxkv.formats.config import CacheConfig
from mlxkv.formats.layout import BLOCK, HALF, LANES, QUARTERS, TOKENS, SideLayout
from mlxkv.formats.quantizers import DIMS, Quantizer

NAMES = ("keys", "values")


def why_no_records(config: CacheConfig, key_dim: int, value_dim: int) -> str | None:
    """Return why pages of heads of these dims have no records that a kernel reads, on any machine, or None."""
    sides = config.keys, config.values
    if sum(side.quantizer.budget is not None for side in sides) == 1:
        return "mixed bits beside other codes have no kernel"
    for i, (side, dim) in enumerate(zip(sides, (key_dim, value_dim), strict=True)):
        stored = side.dims(dim)
        if reason := side.quantizer.why_no_record(stored, config.page, i == 0):
            return reason
        layout = side.quantizer.layout(stored, config.page, i == 0)
        if side.low is not None and layout.saves_nothing(dim):
            return f"{stored} float16 dims would take the room of {dim} in records"
    if key_dim != value_dim:
        return f"keys of {key_dim} and values of {value_dim} dims have no kernel yet"
    return None


@dataclass(frozen=True)
class RecordLayout:
    """Keys and values of a record."""

    keys: SideLayout
    values: SideLayout

    @property
    def words(self) -> int:
        return self.keys.words + self.values.words

    @property
    def header_words(self) -> int:
        return self.keys.header_words + self.values.header_words

    @property
    def quantized_by_kernel(self) -> bool:
        return self.keys.quantized_by_kernel and self.values.quantized_by_kernel

    @property
    def mixed_bits(self) -> bool:
        """Return whether bits differ by block (`MixedBits`): of both sides, or of none, which no kernel reads
        together."""
        return bool(self.keys.widths)

    @property
    def page(self) -> int:
        """Tokens that share a header, or the 16 of a record without one."""
        return max(TOKENS, self.keys.page, self.values.page)


@lru_cache(maxsize=64)
def record_layout(config: CacheConfig, key_dims: int, value_dims: int) -> RecordLayout:
    """Return the layout of a cache for which `why_no_records` is None. Dims are stored dims (`CacheConfig.dims`)."""
    return RecordLayout(
        config.keys.quantizer.layout(key_dims, config.page, keys=True),
        config.values.quantizer.layout(value_dims, config.page, keys=False),
    )


def spans(layout: RecordLayout) -> list[tuple[str, SideLayout, slice, slice]]:
    """(name, layout, its words in a record, its words in a header) of each side."""
    keys, values = layout.keys, layout.values
    words, shared = slice(keys.words, layout.words), slice(keys.header_words, layout.header_words)
    first = NAMES[0], keys, slice(keys.words), slice(keys.header_words)
    return [first, (NAMES[1], values, words, shared)]


class SideCodec(Protocol):
    """What the codec of a side, of either track, says of its pages."""

    quantizer: Quantizer
    dims: int
    page: int


def layout_of(codecs: Sequence[SideCodec]) -> RecordLayout:
    """Make the layout for the codecs of keys and values."""
    sides = zip(codecs, (True, False), strict=True)
    return RecordLayout(
        *(code.quantizer.layout(code.dims, code.page, keys) for code, keys in sides)
    )


def _in_memory(axes: tuple[int, ...], memory: tuple[int, ...]) -> np.ndarray:
    """Return the flat indices of an array of shape `axes` in the order of axes `memory`."""
    return np.arange(np.prod(axes)).reshape(axes).transpose(memory).ravel()


def vector(words: int) -> int:
    """Return the words per lane and load: the longest vector that divides `words`."""
    return next(v for v in (4, 2, 1) if words % v == 0)


@dataclass(frozen=True)
class Field:
    """A bit field of every code of a record, and the words that contain it.

    low: the lowest of the bits in a code. width: how many. words: [n] places of words. codes: [n, 32 / width],
    which code, of [16 tokens, padded dims] flattened, stands at bit `width * i` of a word; 16 * padded dims
    for none.
    """

    low: int
    width: int
    words: np.ndarray
    codes: np.ndarray


@dataclass(frozen=True)
class BlockPart:
    """Position of the codes of a block of 16 dims, or of `width` of their bits from bit `low` on.

    row: words before it in a lane. quarter: the first of its quarters in that word; 4 bits take all of them, 8 bits a
    row for each of r = 0 and 1.
    """

    block: int
    low: int
    width: int
    row: int
    quarter: int


@lru_cache(maxsize=256)
def parts(widths: tuple[int, ...]) -> tuple[BlockPart, ...]:
    """Return the parts of blocks of these widths, in the order in which they fill the words of a lane: codes of 8 and
    of 4 bits, the two low bits of 3-bit codes and codes of 2 bits, the third bits, codes of 1 bit."""
    out: list[BlockPart] = []
    place = 0
    for width, low, of in ((8, 0, (8,)), (4, 0, (4,)), (2, 0, (3, 2)), (1, 2, (3,)), (1, 0, (1,))):
        for block, bits in enumerate(widths):
            if bits in of:
                out.append(BlockPart(block, low, width, *divmod(place, QUARTERS)))
                place += width
    return tuple(out)


def block_bit(part: BlockPart, r: int, p: int, half: int) -> int:
    """Return the lowest bit of the code of slot (r, p, half) of a block of 16 dims in its word (`codes.h`)."""
    if part.width == 8:
        return 8 * p + 16 * half
    if part.width == 4:
        return 4 * (2 * r + p) + 16 * half
    return 4 * part.quarter + (2 * p + r if part.width == 1 else 4 * r + 2 * p) + 16 * half


def block_slot(keys: bool, lane: int, r: int, p: int, half: int) -> tuple[int, int]:
    """(token, dim in its block of 16) of a slot of a lane (`codes.h`)."""
    g, t = divmod(lane, 4)
    return (g + 8 * r, 4 * t + 2 * half + p) if keys else (2 * t + 8 * r + half, 2 * g + p)


def _block_fields(at: SideLayout) -> tuple[Field, ...]:
    """`code_fields` of codes whose bits differ by block. Fields share words."""
    dims = at.blocks * BLOCK
    empty, full_rows = TOKENS * dims, at.quarters // QUARTERS
    by_field: dict[tuple[int, int], dict[int, np.ndarray]] = {}
    for part in parts(at.widths):
        words = by_field.setdefault((part.low, part.width), {})
        for lane, r, p, half in np.ndindex(LANES, 2, 2, 2):
            token, dim = block_slot(at.keys, lane, r, p, half)
            row, bit = part.row + (r if part.width == 8 else 0), block_bit(part, r, p, half)
            word = LANES * row + lane
            # Half a row: the low quarters of both halves of a word, for two lanes.
            if row == full_rows:
                word, bit = LANES * row + lane // 2, bit % 16 + 8 * half + 16 * (lane % 2)
            codes = words.setdefault(word, np.full(32 // part.width, empty))
            codes[bit // part.width] = token * dims + DIMS * part.block + dim
    return tuple(
        Field(low, width, np.array(list(words)), np.stack(list(words.values())))
        for (low, width), words in by_field.items()
    )


@lru_cache(maxsize=64)
def code_fields(at: SideLayout) -> tuple[Field, ...]:
    """Return the fields of a record's codes: one, or two for 3 bits."""
    if at.widths:
        return _block_fields(at)
    count = TOKENS * at.blocks * BLOCK
    # [g, t, j, r, p, half]: lane (g, t), block j (`codes.h`).
    if at.keys:  # token (r, g), dim (j, t, half, p)
        slots = _in_memory((2, 8, at.blocks, 4, 2, 4), (1, 3, 2, 0, 5, 4))
    else:  # token (r, t, half), dim (j, g, p)
        slots = _in_memory((2, 4, 2, at.blocks, 8, 4), (4, 1, 3, 0, 5, 2))
    slots = slots.reshape(LANES, at.blocks, 8, 2)  # the last axis: halves of a word
    if at.bits != 3:
        places = _places(at, np.arange(at.lane_words))
        return (Field(0, at.bits, places, _by_bits(slots, at.bits)),)
    # A pair of blocks has a word with the low bits of each, and one with the high bits of both.
    slots = np.pad(slots, [(0, 0), (0, at.blocks % 2), (0, 0), (0, 0)], constant_values=count)
    word = np.arange(at.lane_words).reshape(-1, 3)
    low, high = _places(at, word[:, :2].ravel()), _places(at, word[:, 2])
    return Field(0, 2, low, _by_bits(slots, 2)), Field(2, 1, high, _by_bits(slots, 1))


def _by_bits(slots: np.ndarray, width: int) -> np.ndarray:
    """[lanes, blocks, 8, half] -> [words, 32 / width], lane by lane."""
    words = slots.reshape(LANES, -1, HALF // width, 2).swapaxes(-1, -2)
    return words.reshape(-1, 32 // width)


def _places(at: SideLayout, words: np.ndarray) -> np.ndarray:
    """Places in memory of these words of every lane: vectors of some words, lane by lane."""
    size = vector(at.lane_words)
    first, offset = np.divmod(words, size)
    return ((first * LANES + np.arange(LANES)[:, None]) * size + offset).ravel()


@lru_cache(maxsize=64)
def number_places(at: SideLayout) -> np.ndarray:
    """Return the flat indices, in memory order, of the float16 numbers [names, 16 tokens, groups]."""
    if at.keys:  # token (r, g)
        return _in_memory((len(at.numbers), 2, 8, at.groups), (2, 1, 0, 3))
    # Scales, then biases; token (r, t, half).
    axes, memory = (2, 4, 2, at.groups), ((1, 3, 0, 2), (3, 1, 0, 2))
    parts = [i * np.prod(axes) + _in_memory(axes, memory[i]) for i in range(len(at.numbers))]
    return np.concatenate(parts)
