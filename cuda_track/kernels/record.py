"""`Record`: the bytes of a page of one kv head, keys then values, as a pool and vLLM's blocks hold them.

    a pool   uint8 [P, G, bytes of a record]: P pages, G kv heads
    a record the tensors of keys, then of values, as their layouts order them, each on a multiple of ALIGN bytes

A page is one run of bytes, so it can travel; heads are cut by tensor parallelism between records.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from cuda_track.codec.codec import Stored
from cuda_track.kernels.layout import Layout

ALIGN = 64  # bytes: loads of 16 find every tensor aligned, whatever its type
WORD = 4  # bytes in which kernels count records


@dataclass(frozen=True)
class Field:
    """One tensor of a record. side: 0 of keys, 1 of values. shape: of one head. start, size: bytes."""

    side: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    size: int


@dataclass(frozen=True)
class Record:
    """layouts: of keys and of values. least: bytes to which a record is padded, so that layers with other bits have
    records of one size."""

    layouts: tuple[Layout, Layout]
    least: int = 0

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        out, start = [], 0
        for side, at in enumerate(self.layouts):
            for name, ((_, *shape), dtype) in at.shapes(1).items():
                size = prod(shape) * dtype.itemsize
                out.append(Field(side, name, tuple(shape), dtype, start, size))
                start += -(-size // ALIGN) * ALIGN
        return tuple(out)

    @cached_property
    def size(self) -> int:
        """Bytes of a record."""
        last = self.fields[-1]
        return max(self.least, last.start + -(-last.size // ALIGN) * ALIGN)

    def empty(self, pages: int, heads: int, device: torch.device | None = None) -> torch.Tensor:
        """Return zeros for `pages` pages, uint8 [pages, G, bytes of a record]."""
        return torch.zeros(pages, heads, self.size, dtype=torch.uint8, device=device)

    def views(self, pool: torch.Tensor) -> tuple[Stored, Stored]:
        """Return the tensors of keys and of values in a pool, [P, G, ...] each, by name."""
        sides: tuple[Stored, Stored] = ({}, {})
        for f in self.fields:
            typed, item = pool.view(f.dtype), f.dtype.itemsize
            part = typed[..., f.start // item : (f.start + f.size) // item]
            sides[f.side][f.name] = part.unflatten(-1, f.shape)
        return sides


def stride(side: Stored) -> int:
    """Return how many 32-bit words lie between two records."""
    # Not of `words`: a token of 32 bits has none, and strides of nothing say nothing.
    x = side["numbers"]
    return x.stride(0) * x.element_size() // (WORD * x.shape[1])
