"""Rows of the golden table for codes whose bits differ by channel or direction: a part of `mlxkv.spec.rows.Table`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mlxkv.formats.calibration import balance, fill
from mlxkv.formats.config import Fill, Side
from mlxkv.spec.bounds import (
    BOUNDS,
    Row,
    compare_codes,
    filled_moments,
    filled_sample,
    mask_at,
    read,
    rms,
    tile_cases,
    under,
)

Rows = Iterator[Row]


class Mixed:
    """What `Table` inherits: `codec`, `floats`, `tensor`, `array`, `unpack` and `_read_rows` are its own."""

    def fill_rows(self) -> Rows:
        """Words and scales of bits by direction, and what the spec's codes stand for."""
        for key, dims, case in tile_cases("fill"):
            spec, page = Fill(2.0, tuple(int(b) for b in case["widths"])), case["x"].shape[2]
            key, bits = f"fill.{key}", np.repeat(case["widths"], dims // len(case["widths"]))
            stored = self.codec(Side(spec), dims, page).encode(self.floats(case["x"]))
            computed, expected = (
                spread(np.asarray(self.array(words), np.int64), bits)
                for words in (stored["codes"], self.tensor(case["codes"]))
            )
            yield compare_codes(
                "encode", key, computed, expected, mask_at(case["near"], computed.size)
            )
            off = self._off(stored["scale"], case["scale"])
            yield Row("encode", f"{key}.scale", case["scale"].size, wrong=off)
            yield from self._read_rows(spec, key, dims, case)


def spread(words: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Return the codes [..., R] of bits [R] in a stream of 32-bit words [..., W], signed or not."""
    stream = (words[..., None] >> np.arange(32)) & 1
    stream = stream.reshape(*words.shape[:-1], -1)
    ends = np.cumsum(bits)
    parts = [
        stream[..., end - b : end] @ (1 << np.arange(b)) for b, end in zip(bits, ends, strict=True)
    ]
    return np.stack(parts, -1)


def fill_map_rows() -> Rows:
    """The bits that directions are given, and their maps: NumPy code that all backends share."""
    tensors, _ = read("fill_maps")
    for name in sorted({key.split(".")[0] for key in tensors}):
        tensors_of_case = under(tensors, name)
        dims, layers, rate = tensors_of_case["asked"]
        sides = []
        for side in range(2 * int(layers)):
            moments = filled_moments(int(dims), 100 * int(name) + side)
            sides.append(balance.balance(*moments)[:2])
        kinds = ("keys", "values") * int(layers)
        sides_by_kind = [(kind, sigma) for kind, (_, sigma) in zip(kinds, sides, strict=True)]
        for side, widths in enumerate(fill.allot(sides_by_kind, float(rate))):
            case, right = (
                f"fill.{name}.{side}",
                tuple(int(b) for b in tensors_of_case[f"{side}.widths"]),
            )
            yield Row("widths", case, len(right), wrong=int(widths != right))
            sample = tensors_of_case[f"{side}.some"]
            error = rms(filled_sample(*fill.pair(*sides[side], right)), sample)
            yield Row("balances", case, sample.size, rms=error, bound=BOUNDS["transforms"])
