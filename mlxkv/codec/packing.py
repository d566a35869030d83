"""Packs codes into uint32 words and back: a little-endian bit stream per token, padded to whole words.

Spec: `spec.affine.pack`. No other module knows the physical order of codes. For stored dims that are
a multiple of 32 it is also the order of `mx.quantize`, so MLX's quantized products read our pages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import mlx.core as mx
import numpy as np


@cache
def _places(dims: int, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For code i: the word it starts in, the bit it starts at, and whether it ends in the next word."""
    start = np.arange(dims) * bits
    return start // 32, start % 32, start % 32 + bits > 32


def pack(codes: mx.array, bits: int) -> mx.array:
    """codes: [..., R] unsigned integers below 2^bits -> [..., W] uint32."""
    dims = codes.shape[-1]
    words = -(-dims * bits // 32)
    codes = codes.astype(mx.uint32)
    if 32 % bits == 0:
        per = 32 // bits
        pad = words * per - dims
        if pad:
            codes = mx.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, pad)])
        codes = codes.reshape(*codes.shape[:-1], words, per)
        return (codes << (mx.arange(per, dtype=mx.uint32) * bits)).sum(-1)
    # A code may straddle two words: its upper bits are also added to the next one.
    word, bit, straddles = _places(dims, bits)
    low = codes << mx.array(bit.astype(np.uint32))
    spill = mx.where(mx.array(straddles), codes >> mx.array(((32 - bit) % 32).astype(np.uint32)), 0)
    out = []
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
    """words: [..., W] uint32 -> [..., R] uint32 codes."""
    mask = (1 << bits) - 1
    if 32 % bits == 0:
        codes = (words[..., None] >> (mx.arange(32 // bits, dtype=mx.uint32) * bits)) & mask
        return codes.reshape(*words.shape[:-1], -1)[..., :dims]
    word, bit, straddles = _places(dims, bits)
    low = mx.take(words, mx.array(word), -1) >> mx.array(bit.astype(np.uint32))
    next_words = mx.take(words, mx.array(np.minimum(word + 1, words.shape[-1] - 1)), -1)
    high = mx.where(
        mx.array(straddles), next_words << mx.array(((32 - bit) % 32).astype(np.uint32)), 0
    )
    return (low | high) & mask


@cache
def planes(bits: int) -> Callable[[mx.array], list[mx.array]]:
    """Return a function of words of any shape, of bits that divide 32 -> for each place in a word the codes there,
    float32 less half of their range, in the shape of the words: code j of word w is code w * 32 / bits + j of a
    token."""
    top, middle = (1 << bits) - 1, 1 << (bits - 1)

    def split(words: mx.array) -> list[mx.array]:
        codes = ((words >> start) & top for start in range(0, 32, bits))
        # By way of signed numbers, which processors turn into floats in one instruction.
        return [code.astype(mx.int32).astype(mx.float32) - middle for code in codes]

    return mx.compile(split)
