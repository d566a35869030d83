"""The cases of the golden tables whose quantizers no header names: their makers (`tests/support/golden_*.py`) and
their driver (`rows.py`) both read them here. A new method adds its quantizers to `METHODS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxkv.formats.quantizers import Affine, MixedBits, Polar, Quantizer
from mlxkv.spec.affine import unpack

# How pages behind calibrated maps are coded, and what learned maps are judged by.
PAGE_SIDES = {"k": Affine(2, 32, clip=0.96), "v": Affine(2, 0, clip=0.92)}
SCALED_SIDES = {"k": Affine(4, 32, symmetric=True), "v": Affine(4, 16, symmetric=True)}
LEARNED_SPEC = Affine(3, 16)
# Low rank that follows the text: tokens of a page, queries that are heard, learning rates.
OJA_PAGE, OJA_WINDOW = 32, 8
OJA_RATES = {"pre": 0.10, "dec": 0.05, "one": 1.0}


def one_code_per_dim(quantizer: Any, words: np.ndarray, dims: int) -> dict[str, np.ndarray]:
    """Unpack words [..., W] uint32 into codes [..., R] of one width."""
    return {"": unpack(words, quantizer.code_bits, dims)}


def _radius_and_angle(quantizer: Any, words: np.ndarray, dims: int) -> dict[str, np.ndarray]:
    pairs = unpack(words, quantizer.pair_bits, dims // 2)
    return {"radius": pairs >> quantizer.angle, "angle": pairs & (2**quantizer.angle - 1)}


def _mixed_widths(quantizer: Any, words: np.ndarray, dims: int) -> dict[str, np.ndarray]:
    widths = quantizer.widths
    return {"": unpack(words, np.repeat(widths, dims // len(widths)), dims)}


@dataclass(frozen=True)
class MethodCases:
    """Codes of a method, what they decode to, and products with them, all without a transform.

    quantizers: by the names of their golden tensors, "DIMS" or "DIMS.ANYTHING".
    codes: unpacks words, by the endings of the tensors (`near_ENDING`) that mark rounding boundaries.
    seed: of the inputs.
    """

    quantizers: dict[str, Quantizer]
    seed: int
    codes: Callable[[Any, np.ndarray, int], dict[str, np.ndarray]] = one_code_per_dim


METHODS = {
    "polar": MethodCases({"64.4.4": Polar(4, 4), "80.2.4": Polar(2, 4)}, 20271, _radius_and_angle),
    "fill": MethodCases(  # the second: an odd number of half words
        {"48.0": MixedBits(2.0, (8, 4, 1)), "48.1": MixedBits(2.0, (3, 2, 2))}, 20273, _mixed_widths
    ),
}
