"""Pack codes into 32-bit words, a little-endian bit stream per token. Spec: `mlxkv.spec.affine.pack`.

Words are int32 tensors with the bits of a uint32: torch can neither shift nor add unsigned words. In
files they are uint32.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import pad

WORD = (1 << 32) - 1


def words_per_token(dims: int, bits: int) -> int:
    """32-bit words that hold `dims` codes."""
    return -(-dims * bits // 32)


@cache
def _places(dims: int, bits: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the word and the bit at which each code starts, int64."""
    start = torch.arange(dims, device=device) * bits
    return start // 32, start % 32


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """codes: [..., R] integers below 2^bits -> [..., W] int32."""
    dims = codes.shape[-1]
    if 32 % bits == 0:
        per = 32 // bits
        codes = pad(codes, (0, -dims % per)).long().unflatten(-1, (-1, per))
        return signed((codes << torch.arange(0, 32, bits, device=codes.device)).sum(-1))
    word, bit = _places(dims, bits, codes.device)
    wide = codes.long() << bit  # 32 + bits bits at most: what straddles goes into the next word
    words = torch.zeros(
        (*codes.shape[:-1], words_per_token(dims, bits) + 1), dtype=torch.int64, device=codes.device
    )
    words.index_add_(-1, word, wide & WORD)  # no two codes share a bit: a sum is a union
    words.index_add_(-1, word + 1, wide >> 32)
    return signed(words[..., :-1])


def unpack(words: torch.Tensor, bits: int, dims: int) -> torch.Tensor:
    """words: [..., W] int32 -> [..., R] int32 codes."""
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
        codes = (words[..., None] >> shifts) & ((1 << bits) - 1)
        return codes.flatten(-2)[..., :dims]
    word, bit = _places(dims, bits, words.device)
    wide = words.long() & WORD
    low = wide[..., word]
    next_word = wide[..., (word + 1).clamp(max=words.shape[-1] - 1)]
    return (((low | (next_word << 32)) >> bit) & ((1 << bits) - 1)).int()


def signed(words: torch.Tensor) -> torch.Tensor:
    """Convert int64 below 2^32 to int32 of the same bits."""
    return (words - ((words >> 31) << 32)).int()


def as_file(x: torch.Tensor) -> torch.Tensor:
    """x as files hold it."""
    return x.contiguous().view(torch.uint32) if x.dtype == torch.int32 else x.contiguous()


def from_file(x: torch.Tensor) -> torch.Tensor:
    """Invert `as_file`."""
    return x.view(torch.int32) if x.dtype == torch.uint32 else x
