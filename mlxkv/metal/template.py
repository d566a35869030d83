"""Template values and small inputs that several kernels share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from math import e, log2

import mlx.core as mx
import numpy as np

from mlxkv.formats import levels
from mlxkv.formats.lowrank import DIMS
from mlxkv.formats.records import MOST_BLOCKS, RecordLayout, SideLayout

MAX_TERMS = 8  # of the polynomial through the levels of a codebook: 4 bits
LOG2E = log2(e)
Pair = tuple[mx.array, mx.array]


def side_template(at: SideLayout, suffix: str = "") -> dict[str, object]:
    """The template values that describe a side. C: coefficients for `kv_level`."""
    if at.widths:
        return _filled(suffix)
    bits = at.bits - at.signs
    terms = levels.polynomial(at.dims, bits) / 2**bits if at.codebook else ()
    return {
        f"BITS{suffix}": at.bits,
        f"GROUP{suffix}": at.group,
        f"SYMMETRIC{suffix}": int(at.symmetric),
        f"CHANNEL{suffix}": int(at.channel),
        f"OUTER{suffix}": int(at.outer),
        f"PER_TOKEN{suffix}": int(not (at.channel or at.tree or at.bits == 16)),
        f"PAIRS{suffix}": int(at.pairs),
        f"CODEBOOK{suffix}": int(at.codebook),
        f"SIGNS{suffix}": int(at.signs),
        f"TREE{suffix}": at.tree,
        f"BOOKS{suffix}": at.books,
        f"C{suffix}": _constants(terms),
    }


def _filled(suffix: str) -> dict[str, object]:
    """`side_template` of any side whose blocks have widths of their own: a table tells them apart."""
    names = ("SYMMETRIC", "CHANNEL", "OUTER", "PER_TOKEN", "PAIRS", "CODEBOOK", "SIGNS", "TREE")
    values = {f"{name}{suffix}": int(name == "SYMMETRIC") for name in names}
    one = {"BITS": 2, "GROUP": DIMS * MOST_BLOCKS, "BOOKS": (0,), "C": _constants(()), "FILL": 1}
    return values | {f"{name}{suffix}": value for name, value in one.items()}


@lru_cache(maxsize=256)
def sides_template(layout: RecordLayout) -> dict[str, object]:
    """`side_template` of both sides."""
    return side_template(layout.keys, "_K") | side_template(layout.values, "_V")


def sealing_template(at: SideLayout, suffix: str) -> dict[str, object]:
    """Further template values for sealing. B: the boundaries above 0 between levels."""
    table = levels.sphere(at.dims, at.bits) if at.codebook else np.zeros(2)
    middles = (table[1:] + table[:-1])[len(table) // 2 :] / 2
    return {f"CORRECTED{suffix}": int(at.corrected), f"B{suffix}": _constants(middles)}


def cap_bits(softcap: float | None) -> int:
    """The template value CAP: a cap of scores in base-2 exponents, float32, as the integer of its bits; 0 for
    none."""
    return 0 if softcap is None else int(np.float32(softcap * LOG2E).view(np.int32))


def _constants(values: Sequence[float]) -> tuple[int, ...]:
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
