"""Decode weights that are stored in 8 or fewer bits, as MLX packs them, into float16: NumPy only.

`tiny` and `tiny-qwen` stand for models in full precision, in tests and in docs, and are stored in 8 and 6 bits to be
small. Both tracks, and the training, compute with the float16 numbers that `decode` returns, so that all see the same
weights. Other models run as they are stored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

KEYS = ("quantization", "quantization_config")


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json as it is of the decoded weights."""
    return {name: x for name, x in config.items() if name not in KEYS}


def decode(folder: Path) -> dict[str, np.ndarray]:
    """Return the weights of a folder by name: what is stored in affine codes decoded to float16.

    A code q of a group with scale s and bias b is s q + b, computed in float32 and rounded once to float16.
    Raises ValueError for codes of another kind.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = load_file(folder / "model.safetensors")
    usual = config.get("quantization") or {}
    out = {}
    for name, x in weights.items():
        stem, _, part = name.rpartition(".")
        if part == "weight" and x.dtype == np.uint32:
            how = usual.get(stem, usual)
            if how.get("mode", "affine") != "affine":
                raise ValueError(f"[decode] only affine codes; got {how} of {stem}")
            pair = (weights[f"{stem}.{kind}"] for kind in ("scales", "biases"))
            scales, biases = (one.astype(np.float32)[..., None] for one in pair)
            groups = _codes(x, how["bits"]).reshape(*scales.shape[:-1], how["group_size"])
            out[name] = (scales * groups + biases).astype(np.float16).reshape(len(x), -1)
        elif part not in ("scales", "biases"):
            out[name] = x
    return out


def _codes(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack rows of 32-bit words into codes, float32 [rows, columns]: a stream of bits, the lowest first."""
    stream = np.unpackbits(words.astype("<u4").view(np.uint8), axis=-1, bitorder="little")
    return stream.reshape(len(words), -1, bits) @ (2.0 ** np.arange(bits)).astype(np.float32)
