"""Weights of a GGUF file as MLX arrays: codes in a layout that MLX supports are kept, others are decoded.

`mx.load` gives the same arrays for Q4_0, Q4_1 and Q8_0 in half the time (SmolLM2 in Q4_1: .4 s, here .8 s, with 80 MB
less), but decodes Q4_K and BF16 to float16, refuses files with Q5_0, Q5_1, Q5_K, Q3_K or IQ types, and crashes on some
damaged headers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlxkv.catalog.folder import Folder
from mlxkv.catalog.gguf.config import CODES, GROUP, hub_name
from mlxkv.catalog.gguf.header import BY_NAME

AT_ONCE = 1 << 24  # numbers decoded at once, in float32


def read_weights(
    folder: Folder,
    dtype: mx.Dtype,
    bits: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, mx.array], dict[str, dict[str, int]]]:
    """Return arrays by the hub's names, and bits and group size of each quantised module.

    dtype: of all numbers except scales and biases of codes, which stay float16. bits: code width to which
    unquantised matrices are rounded; None keeps them in `dtype`. progress: called with (bytes read, all bytes).
    One tensor at a time is in memory twice.
    """
    header, gemma = folder.headers[0], folder.config["model_type"].startswith("gemma")
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    arrays: dict[str, mx.array] = {}
    modules: dict[str, dict[str, int]] = {}
    names = {x: hub_name(x, "gemma3" if gemma else "") for x in header.tensors}
    tensors = {name: header.tensors[x] for x, name in names.items() if name is not None}
    source = {name: x for x, name in names.items()}
    total, count = sum(x.span[1] - x.span[0] for x in tensors.values()), 0
    for name, tensor in tensors.items():
        first, last = tensor.span
        kind = BY_NAME[tensor.dtype]
        raw = np.fromfile(folder.path, np.uint8, last - first, offset=first)
        raw = raw.reshape(tensor.shape[0] if len(tensor.shape) == 2 else 1, -1)
        part = source[name].split(".")[-2]
        if folder.config["model_type"] == "llama" and part in heads:
            raw = _permuted(raw.reshape(tensor.shape[0], -1), folder.config[heads[part]])
        stem = name.removesuffix(".weight")
        if tensor.dtype in CODES:
            words, scales, biases = codes(raw, tensor.dtype)
            arrays[name], arrays[f"{stem}.scales"], arrays[f"{stem}.biases"] = words, scales, biases
            modules[stem] = {"group_size": GROUP, "bits": CODES[tensor.dtype]}
        else:
            x = _decoded(raw, kind.name, tensor.shape, dtype, gemma and len(tensor.shape) == 1)
            if bits is not None and len(tensor.shape) == 2:
                group = 64 if tensor.shape[1] % 64 == 0 else 32
                x, arrays[f"{stem}.scales"], arrays[f"{stem}.biases"] = mx.quantize(x, group, bits)
                mx.eval(x, arrays[f"{stem}.scales"], arrays[f"{stem}.biases"])
                modules[stem] = {"group_size": group, "bits": bits}
            arrays[name] = x
        count += last - first
        if progress is not None:
            progress(count, total)
    return arrays, modules


def _permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows of a q or k projection as on the hub: llama.cpp stores the two halves of a rotary pair together."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _decoded(
    raw: np.ndarray, kind: str, shape: tuple[int, ...], dtype: mx.Dtype, one_more: bool
) -> mx.array:
    """Decode a tensor to `dtype`. one_more: subtract the 1 that llama.cpp adds to Gemma's norms."""
    if kind == "BF16":
        out = mx.array(raw.view(np.uint16)).view(mx.bfloat16)
    elif kind in ("F16", "F32"):
        out = mx.array(raw.view(np.float16 if kind == "F16" else np.float32))
    else:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        half = np.empty(shape, np.float32 if dtype == mx.float32 else np.float16)
        step = max(1, AT_ONCE // shape[1])
        for at in range(0, len(raw), step):
            half[at : at + step] = dequantize(raw[at : at + step], GGMLQuantizationType[kind])
        out = mx.array(half)
    if one_more:
        out = out.astype(mx.float32) - 1
    out = out.reshape(shape).astype(dtype)
    mx.eval(out)
    return out


def codes(raw: np.ndarray, kind: str) -> tuple[mx.array, mx.array, mx.array]:
    """Convert blocks of a matrix, bytes [rows, bytes of a row], to MLX's affine codes with groups of 32: packed words
    uint32, scales and biases float16, all [rows, ...].

    Codes are unchanged; scales and biases are exact except for Q4_K and Q5_K, where each is the product of a float16
    number and a 6-bit integer, rounded to float16.
    """
    blocks = raw.reshape(-1, BY_NAME[kind].size)
    numbers, scale, bias = _PARTS[kind](blocks)
    words = _packed(numbers.reshape(-1, GROUP), CODES[kind]).reshape(len(raw), -1)
    scales, biases = (mx.array(x.astype(np.float16).reshape(len(raw), -1)) for x in (scale, bias))
    return mx.array(words.view(np.uint32)), scales, biases


def _packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes [groups, 32] into a stream of bits, lowest first."""
    if bits == 8:
        return numbers
    if bits == 4:
        return numbers[:, ::2] | numbers[:, 1::2] << 4
    eight = numbers.reshape(-1, 8).astype(np.uint64) << np.arange(0, 40, 5, dtype=np.uint64)
    return np.bitwise_or.reduce(eight, axis=1)[:, None].view(np.uint8)[:, :5].reshape(-1)


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(low: np.ndarray) -> np.ndarray:
    return np.concatenate([low & 15, low >> 4], axis=-1)


def _legacy(x: np.ndarray, bits: int, biased: bool) -> tuple[np.ndarray, ...]:
    """Split blocks of Q4_0 and Q5_0, with signed codes, or of Q4_1 and Q5_1 (`biased`)."""
    scale, at = _half(x, 0), 4 if biased else 2
    bias = _half(x, 2) if biased else -(2 ** (bits - 1)) * scale
    if bits == 4:
        return _nibbles(x[:, at:]), scale, bias
    fifth = np.unpackbits(x[:, at : at + 4], axis=-1, bitorder="little") << 4
    return _nibbles(x[:, at + 4 :]) | fifth, scale, bias


def _q8_0(x: np.ndarray) -> tuple[np.ndarray, ...]:
    scale = _half(x, 0)
    return x[:, 2:] ^ 128, scale, -128 * scale


def _k(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split blocks of Q4_K and Q5_K: low nibbles of 8 groups [blocks, 8, 32], scales and biases [blocks, 8]."""
    from gguf.quants import Q4_K

    scales, lows = Q4_K.get_scale_min(x[:, 4:16])
    low = x[:, -128:].reshape(-1, 4, 32)
    numbers = np.stack([low & 15, low >> 4], axis=2).reshape(-1, 8, 32)
    return numbers, _half(x, 0) * scales, -_half(x, 2) * lows


def _q5_k(x: np.ndarray) -> tuple[np.ndarray, ...]:
    numbers, scale, bias = _k(x)
    high = x[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]
    return numbers | (high & 1) << 4, scale, bias


_PARTS: dict[str, Any] = {
    "Q4_0": partial(_legacy, bits=4, biased=False),
    "Q4_1": partial(_legacy, bits=4, biased=True),
    "Q5_0": partial(_legacy, bits=5, biased=False),
    "Q5_1": partial(_legacy, bits=5, biased=True),
    "Q8_0": _q8_0,
    "Q4_K": _k,
    "Q5_K": _q5_k,
}
