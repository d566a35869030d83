"""`Pool`: the pages of one layer for Triton, which rows of a batch, beams and forked caches share.

A page is never written to after it was quantized, so a prefix is shared by counting its holders.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cuda_track.codec.codec import Codec, QuantizedPages, Stored
from cuda_track.kernels.layout import Layout
from cuda_track.kernels.record import Record

GROWTH = 4  # spare capacity is a quarter of what is stored


class Pool:
    """Pages of one layer. bytes: uint8 [pages, G, bytes of a record]. sides: the tensors of keys and of values in
    them, [pages, G, ...]. holders: how many of each page."""

    def __init__(self):
        self.bytes = torch.empty(0)
        self.sides: tuple[Stored, Stored] = ({}, {})
        self.holders: list[int] = []
        self._free: list[int] = []

    def add(self, sides: tuple[Stored, Stored], record: Record) -> list[int]:
        """Add pages [n, G, ...] of both sides, held once. Returns their places."""
        (count, heads), device = sides[0]["words"].shape[:2], sides[0]["words"].device
        places = self.reserve(count, record, heads, device)
        for pool, new in zip(self.sides, sides, strict=True):
            for name, x in new.items():
                pool[name].index_copy_(0, torch.tensor(places, device=device), x)
        return places

    def reserve(self, count: int, record: Record, heads: int, device) -> list[int]:
        """Reserve places for `count` pages to be written, held once."""
        if len(self._free) < count:
            self._grow(record, heads, count - len(self._free), device)
        places = [self._free.pop() for _ in range(count)]
        for place in places:
            self.holders[place] = 1
        return places

    def _grow(self, record: Record, heads: int, count: int, device) -> None:
        have = len(self.holders)
        added = max(count, have // GROWTH, 8)
        grown = record.empty(have + added, heads, device)
        if have:
            grown[:have] = self.bytes
        self.bytes = grown
        for side, new in zip(self.sides, record.views(grown), strict=True):
            side.update(new)  # snapshots of stores read the same dicts
        self.holders += [0] * added
        self._free += range(have + added - 1, have - 1, -1)

    def hold(self, places: list[int]) -> None:
        for place in places:
            self.holders[place] += 1

    def release(self, places: list[int]) -> None:
        for place in reversed(places):  # the lowest are taken first
            self.holders[place] -= 1
            if not self.holders[place]:
                self._free.append(place)


@dataclass(frozen=True)
class PoolPages(QuantizedPages):
    """A snapshot that attention reads.

    table: [B, most] int32, places of the pages of each row. counts: [B] int32, how many. tokens: of the longest
    row.
    """

    codecs: tuple[Codec, Codec]
    layouts: tuple[Layout, Layout]
    sides: tuple[Stored, Stored]
    table: torch.Tensor
    counts: torch.Tensor
    tokens: int

    @property
    def stored(self) -> tuple[Stored, Stored]:
        """The pages as plain ops read them, for rows of one length."""
        places = self.table.long()
        keys, values = (
            at.restore({name: x[places] for name, x in side.items()})
            for side, at in zip(self.sides, self.layouts, strict=True)
        )
        return keys, values
