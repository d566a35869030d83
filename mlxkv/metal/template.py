"""Template values and small inputs shared by several kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from math import e, log2

import mlx.core as mx
import numpy as np

from mlxkv.formats import levels
from mlxkv.formats.layout import LANES, QUARTERS, SideLayout
from mlxkv.formats.quantizers import DIMS, GAINS, MOST_BLOCKS, STEPS
from mlxkv.formats.records import RecordLayout, parts

MAX_TERMS = 8  # in the polynomial through the levels of a codebook of 4 bits
LOG2E = log2(e)
# Words of a mixed-bits table: before the blocks, per block, and per block for quantizing.
HEAD, ENTRY, BLOCK_ENTRY = 8, 12, 8
HALF_ROW, THIRD, EIGHT, THIRD_HALF_ROW = 1, 2, 4, 8  # flags of blocks that need extra reads
SPECIAL = 1 << 31  # set if any of these is
Pair = tuple[mx.array, mx.array]


def side_template(at: SideLayout, suffix: str = "") -> dict[str, object]:
    """Return the template values of a side. C: coefficients for `kv_level`."""
    if at.widths:
        return _mixed_bits(suffix)
    bits = at.bits
    terms = levels.polynomial(at.dims, bits) / 2**bits if at.codebook else ()
    return {
        f"BITS{suffix}": at.bits,
        f"GROUP{suffix}": at.group,
        f"SYMMETRIC{suffix}": int(at.symmetric),
        f"CHANNEL{suffix}": int(at.channel),
        f"PER_TOKEN{suffix}": int(not (at.channel or at.tree or at.bits == 16)),
        f"PAIRS{suffix}": int(at.pairs),
        f"CODEBOOK{suffix}": int(at.codebook),
        f"TREE{suffix}": at.tree,
        f"BOOKS{suffix}": at.books,
        f"C{suffix}": _constants(terms),
    }


def _mixed_bits(suffix: str) -> dict[str, object]:
    """Return the `side_template` of mixed bits, the same for all widths, which kernels read from a table."""
    names = ("SYMMETRIC", "CHANNEL", "PER_TOKEN", "PAIRS", "CODEBOOK", "TREE")
    values: dict[str, object] = {f"{n}{suffix}": int(n == "SYMMETRIC") for n in names}
    other_values = {
        "BITS": 2,
        "GROUP": DIMS * MOST_BLOCKS,
        "BOOKS": (0,),
        "C": _constants(()),
        "MIXED_BITS": 1,
    }
    return values | {f"{name}{suffix}": value for name, value in other_values.items()}


@lru_cache(maxsize=256)
def sides_template(layout: RecordLayout) -> dict[str, object]:
    """Return the `side_template` of both sides."""
    return side_template(layout.keys, "_K") | side_template(layout.values, "_V")


def quantizing_template(at: SideLayout, suffix: str) -> dict[str, object]:
    """Return additional template values for quantizing. B: boundaries above 0 between levels."""
    table = levels.sphere(at.dims, at.bits) if at.codebook else np.zeros(2)
    middles = (table[1:] + table[:-1])[len(table) // 2 :] / 2
    return {f"B{suffix}": _constants(middles)}


def cap_bits(softcap: float | None) -> int:
    """Return the template value CAP: the float32 bits of the cap of scores in base-2 exponents; 0 for no cap."""
    return 0 if softcap is None else int(np.float32(softcap * LOG2E).view(np.int32))


def _constants(values: Sequence[float] | np.ndarray) -> tuple[int, ...]:
    """Return the float32 bits of `values` as integers, padded with zeros to `MAX_TERMS`."""
    bits = np.zeros(MAX_TERMS, np.float32)
    bits[: len(values)] = values
    return tuple(int(x) for x in bits.view(np.int32))


@lru_cache(maxsize=256)
def ints(*values: int) -> mx.array:
    """Return sizes as int32 [n], cached since every step and layer needs the same."""
    return mx.array(values, mx.int32)


@cache
def exponents(scale: float) -> mx.array:
    """Return [scale of scores in base-2 exponents, log2(e), zeros]."""
    return mx.array([scale * LOG2E, LOG2E] + [0.0] * 6, mx.float32)


@cache
def nothing(dtype: mx.Dtype = mx.float32) -> mx.array:
    """Return a placeholder for an input that a kernel does not read."""
    return mx.zeros(8, dtype)


# -- mixed bits: tables with the position and width of the codes of each block of 16 dims, so that one kernel serves
# all layers of a model, whose widths differ. Positions: `formats.records.parts`; `text/mixed_bits.h` reads them.


def _second_step(width: int) -> int:
    """Return the bit offset of the code of slot p = 1 from that of p = 0."""
    return {4: 4, 8: 8}.get(width, 2)


def _twice(mask: int) -> int:
    return mask | mask << 16


def _halves(value: float) -> int:
    return _twice(int(np.float16(value).view(np.uint16)))


def _float(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def _entries(at: SideLayout, start: int) -> np.ndarray:
    """Return the table of a side, one row per block: [MOST_BLOCKS, ENTRY] uint32. start: words before the side.

    0, 1: shifts for r = 0 and 1, the second with SPECIAL. 2, 3: masks of slots p = 0 and 1. 4, 5: halves that centre
    codes of p = 0 and 1 on 2^(b-1) below a leading one. 6: words before the row of its third bits, or before the half
    row. 7: shift of the third bits; from bit 8 on `_second_step`; from bit 16 on HALF_ROW, THIRD, EIGHT,
    THIRD_HALF_ROW. 8: words before its row in the record, 0 if in the half row at the end. 9: float that undoes
    `_second_step` in a tile. 10: float (2^b - 1) / 2. 11: unused.
    """
    out, full_rows = np.zeros((MOST_BLOCKS, ENTRY), np.uint32), at.quarters // QUARTERS
    for part in parts(at.widths):
        row, first, entry = start + LANES * part.row, 4 * part.quarter, out[part.block]
        if part.low:
            flags = THIRD | (THIRD_HALF_ROW if part.row == full_rows else 0)
            entry[1] |= SPECIAL
            entry[6], entry[7] = row, entry[7] | first | flags << 16
            continue
        bits = at.widths[part.block]
        step = _second_step(bits)
        place = 0 if bits == 8 else step  # bit of slot p = 1, once below the leading one
        flags = (EIGHT if bits == 8 else 0) | (HALF_ROW if part.row == full_rows else 0)
        second = first + {8: 0, 4: 8, 2: 4, 1: 1}[part.width]
        entry[6 if flags & HALF_ROW else 8] = row
        entry[0] = first
        entry[1] |= second | (SPECIAL if flags else 0)
        mask = (1 << part.width) - 1
        entry[2:4] = _twice(mask), _twice(mask << place)
        entry[4:6] = [_halves(-1024 - 2.0 ** (bits - 1 + n)) for n in (0, place)]
        entry[7] |= step << 8 | flags << 16
        entry[9:11] = _float(2.0**-place), _float((2**bits - 1) / 2)
    return out


@lru_cache(maxsize=512)
def mixed_bits_table(layout: RecordLayout) -> mx.array:
    """Return the table that kernels read in place of headers, [HEAD + 2 MOST_BLOCKS ENTRY] uint32.

    Contents: words of a record, words of its keys, stored dims of keys and of values, blocks of keys and of values,
    0, 0, then `_entries` of keys and of values.
    """
    sides = layout.keys, layout.values
    head = [layout.words, layout.keys.words, *(x.dims for x in sides)]
    head += [*(len(x.widths) for x in sides), 0, 0]
    entries = (_entries(x, n).ravel() for x, n in zip(sides, (0, head[1]), strict=True))
    return _shared_array(np.concatenate([np.array(head, np.uint32), *entries]))


@lru_cache(maxsize=512)
def mixed_bits_quantizing(at: SideLayout) -> mx.array:
    """Return the quantizing table of a side, [HEAD + MOST_BLOCKS BLOCK_ENTRY] float32.

    Contents: blocks, stored dims, words of the codes, 1 / stored dims, 0, ...; then per block the distance between
    levels for variance 1, the gain, (2^b - 1) / 2, b, 0, ...
    """
    out = np.zeros((MOST_BLOCKS, BLOCK_ENTRY), np.float32)
    for entry, bits in zip(out, at.widths, strict=False):
        entry[:4] = GAINS[bits] * STEPS[bits], GAINS[bits], (2**bits - 1) / 2, bits
    head = np.zeros(HEAD, np.float32)
    head[:4] = len(at.widths), at.dims, at.code_words, 1 / at.dims
    return _shared_array(np.concatenate([head, out.ravel()]))


def _shared_array(numbers: np.ndarray) -> mx.array:
    """Return an array that all layers and threads may share."""
    with mx.stream(mx.cpu):
        array = mx.array(numbers)
        mx.eval(array)
    return array
