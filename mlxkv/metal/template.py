"""Template values and small inputs that several kernels share."""

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

MAX_TERMS = 8  # of the polynomial through the levels of a codebook: 4 bits
LOG2E = log2(e)
# Mixed bits: words of a table before the blocks, of a block, and of a block for quantizing.
HEAD, ENTRY, BLOCK_ENTRY = 8, 12, 8
HALF_ROW, THIRD, EIGHT, THIRD_HALF_ROW = 1, 2, 4, 8  # of blocks that are not read in one go
SPECIAL = 1 << 31  # all of these
Pair = tuple[mx.array, mx.array]


def side_template(at: SideLayout, suffix: str = "") -> dict[str, object]:
    """Return the template values that describe a side. C: coefficients for `kv_level`."""
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
    """`side_template` of any side whose blocks have widths of their own: a table tells them apart."""
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
    """`side_template` of both sides."""
    return side_template(layout.keys, "_K") | side_template(layout.values, "_V")


def quantizing_template(at: SideLayout, suffix: str) -> dict[str, object]:
    """Further template values for quantizing. B: the boundaries above 0 between levels."""
    table = levels.sphere(at.dims, at.bits) if at.codebook else np.zeros(2)
    middles = (table[1:] + table[:-1])[len(table) // 2 :] / 2
    return {f"B{suffix}": _constants(middles)}


def cap_bits(softcap: float | None) -> int:
    """Return the template value CAP: a cap of scores in base-2 exponents, float32, as the integer of its bits; 0 for
    none."""
    return 0 if softcap is None else int(np.float32(softcap * LOG2E).view(np.int32))


def _constants(values: Sequence[float] | np.ndarray) -> tuple[int, ...]:
    """Float32 values as the integers of their bits; zeros fill up to `MAX_TERMS`."""
    bits = np.zeros(MAX_TERMS, np.float32)
    bits[: len(values)] = values
    return tuple(int(x) for x in bits.view(np.int32))


@lru_cache(maxsize=256)
def ints(*values: int) -> mx.array:
    """[n] int32 of sizes, cached: every step and every layer asks for the same."""
    return mx.array(values, mx.int32)


@cache
def exponents(scale: float) -> mx.array:
    """[scale of scores in base-2 exponents, log2(e), zeros]."""
    return mx.array([scale * LOG2E, LOG2E] + [0.0] * 6, mx.float32)


@cache
def nothing(dtype: mx.Dtype = mx.float32) -> mx.array:
    """Stands for an input that a kernel does not read."""
    return mx.zeros(8, dtype)


# -- mixed bits: tables that say where the codes of each block of 16 dims stand and how wide they are, so that
# one text serves all layers of a model, whose widths differ. Places: `formats.records.parts`;
# `text/mixed_bits.h` reads them.


def _second_step(width: int) -> int:
    """By how many bits the code of slot p = 1 lies above that of p = 0."""
    return {4: 4, 8: 8}.get(width, 2)


def _twice(mask: int) -> int:
    return mask | mask << 16


def _halves(value: float) -> int:
    return _twice(int(np.float16(value).view(np.uint16)))


def _float(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def _entries(at: SideLayout, start: int) -> np.ndarray:
    """[MOST_BLOCKS, ENTRY] uint32, one row a block. start: words before the side in a record.

    0, 1 shifts for r = 0 and 1, the second with SPECIAL; 2, 3 masks of slots p = 0 and 1; 4, 5 halves that centre codes
    of p = 0 and 1 on 2^(b-1) below a leading one; 6 words before the row of its third bits, or before the half row; 7
    the shift of the third bits, from bit 8 on `_second_step`, from bit 16 on HALF_ROW, THIRD, EIGHT, THIRD_HALF_ROW; 8
    words before its row in the record, 0 where it stands in the half row at the end; 9 the float that undoes
    `_second_step` in a tile; 10 the float (2^b - 1) / 2; 11 nothing.
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
        place = 0 if bits == 8 else step  # of p = 1, once it is below the leading one
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
    """Return what kernels read in the place of headers, [HEAD + 2 MOST_BLOCKS ENTRY] uint32: words of a
    record, of its keys,
    stored dims of keys and of values, blocks of keys and of values, 0, 0, then the blocks of both (`_entries`)."""
    sides = layout.keys, layout.values
    head = [layout.words, layout.keys.words, *(x.dims for x in sides)]
    head += [*(len(x.widths) for x in sides), 0, 0]
    entries = (_entries(x, n).ravel() for x, n in zip(sides, (0, head[1]), strict=True))
    return _shared_array(np.concatenate([np.array(head, np.uint32), *entries]))


@lru_cache(maxsize=512)
def mixed_bits_quantizing(at: SideLayout) -> mx.array:
    """Return the table [HEAD + MOST_BLOCKS BLOCK_ENTRY], float32: blocks, stored dims, words of the codes,
    1 / stored dims, zeros; then for each block the distance of levels for variance 1, the gain, (2^b - 1) / 2, b,
    zeros."""
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
