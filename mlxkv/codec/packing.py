"""Pack codes into uint32 words and back: a little-endian bit stream per token, padded to whole words.

Spec: `spec.affine.pack`. No other module depends on the physical order of codes. For stored dims that are a multiple
of 32 it is also the order of `mx.quantize`, so MLX's quantized products can read the pages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import mlx.core as mx
import numpy as np


@cache
def _places(dims: int, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, for each code, the word and bit it starts at, and whether it ends in the next word."""
    start = np.arange(dims) * bits
    return start // 32, start % 32, start % 32 + bits > 32


def pack(codes: mx.array, bits: int) -> mx.array:
    """Pack codes [..., R], unsigned integers below 2^bits, into uint32 [..., W]."""
    dims = codes.shape[-1]
    words = -(-dims * bits // 32)
    codes = codes.astype(mx.uint32)
    if 32 % bits == 0:
        per = 32 // bits
        pad = words * per - dims
        if pad:
            codes = mx.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, pad)])
        codes = mx.reshape(codes, (*codes.shape[:-1], words, per))
        return (codes << (mx.arange(per, dtype=mx.uint32) * bits)).sum(-1)
    # A code may straddle two words: its upper bits are also added to the next one.
    word, bit, straddles = _places(dims, bits)
    low = codes << mx.array(bit.astype(np.uint32))
    spill = mx.where(mx.array(straddles), codes >> mx.array(((32 - bit) % 32).astype(np.uint32)), 0)
    out: list[mx.array] = []
    for w in range(words):
        starts, straddling = (
            np.flatnonzero(word == w),
            np.flatnonzero((word == w - 1) & straddles),
        )
        total = low[..., starts[0] : starts[-1] + 1].sum(-1)
        for i in straddling:
            total = total + spill[..., int(i)]
        out.append(total)
    return mx.stack(out, -1)


def unpack(words: mx.array, bits: int, dims: int) -> mx.array:
    """Unpack words [..., W] uint32 into codes [..., R] uint32."""
    mask = (1 << bits) - 1
    if 32 % bits == 0:
        codes = (words[..., None] >> (mx.arange(32 // bits, dtype=mx.uint32) * bits)) & mask
        return mx.reshape(codes, (*words.shape[:-1], -1))[..., :dims]
    word, bit, straddles = _places(dims, bits)
    low = mx.take(words, mx.array(word), -1) >> mx.array(bit.astype(np.uint32))
    next_words = mx.take(words, mx.array(np.minimum(word + 1, words.shape[-1] - 1)), -1)
    high = mx.where(
        mx.array(straddles), next_words << mx.array(((32 - bit) % 32).astype(np.uint32)), 0
    )
    return (low | high) & mask


@cache
def planes(bits: int) -> Callable[[mx.array], list[mx.array]]:
    """Return a function that splits words of any shape into one array of codes per place in a word.

    The arrays have the shape of the words; codes are float32, centred on the middle of their range. Code j of word w
    is code w * 32 / bits + j of a token. bits: a divisor of 32.
    """
    top, middle = (1 << bits) - 1, 1 << (bits - 1)

    def split(words: mx.array) -> list[mx.array]:
        codes = ((words >> start) & top for start in range(0, 32, bits))
        # Via signed integers, which processors convert to floats in one instruction.
        return [code.astype(mx.int32).astype(mx.float32) - middle for code in codes]

    return mx.compile(split)
