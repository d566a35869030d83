"""Sealed pages as mlxkv's page records: a store for Metal kernels, as `sealed.Codes` is one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cuda_track import exchange, records
from cuda_track.codec import Codec, Stored
from cuda_track.mps import source
from cuda_track.pages import Pages
from cuda_track.records import SideLayout
from cuda_track.sealed import NAMES, Pair
from mlxkv.config import CacheConfig


def why_not(config: CacheConfig, dims: tuple[int, int]) -> str | None:
    """Why no Metal kernel reads caches of `config` with heads of these dims, or None."""
    if source.compiler() is None:
        return "no Metal here"
    if dims[0] != dims[1]:
        return f"keys of {dims[0]} and values of {dims[1]} dims have no kernel"
    if config.follows:
        return "bases that follow the text have no kernel here"
    for side, dim, keys in zip((config.keys, config.values), dims, (True, False), strict=True):
        stored = side.dims(dim)
        if reason := records.why_not(side.quantizer, stored, config.page, keys):
            return reason
        at = records.layout(side.quantizer, stored, config.page, keys)
        if at.tree or at.signs:
            return "polar trees and residual stages have no kernel here"
    return None


@dataclass(frozen=True)
class RecordPages:
    """Pages as kernels read them: the first `tokens` / 16 records of `buffer`, [B, G, capacity, words],
    and the headers of the pages, where the format has any."""

    codecs: tuple[Codec, Codec]
    layouts: tuple[SideLayout, SideLayout]
    buffer: torch.Tensor
    headers: torch.Tensor | None
    tokens: int

    @property
    def parts(self) -> tuple[RecordPages]:
        """Runs of one transform."""
        return (self,)

    @property
    def stored(self) -> tuple[Stored, Stored]:
        """As plain ops read them."""
        state = {"records": self.buffer[:, :, : self.tokens // records.TOKENS]}
        if self.headers is not None:
            state["headers"] = self.headers[:, :, : self.tokens // self.codecs[0].page]
        codes = exchange.to_codes(state, self.codecs)
        return tuple(codes[name] for name in NAMES)

    def decode(self, side: int, dtype: torch.dtype) -> torch.Tensor:
        """Keys (side 0) or values (1) as attention sees them: [B, G, T, D]."""
        return self.codecs[side].decode(self.stored[side], dtype)


class Records:
    """Sealed pages in one buffer of page records; plain ops encode."""

    def __init__(self, config: CacheConfig, codecs: tuple[Codec, Codec]):
        self.config, self.codecs = config, codecs
        self.layouts = exchange.layouts(codecs)
        self._pages = Pages()

    @property
    def count(self) -> int:
        return self._pages.count

    def make_room(self, pair: Pair, count: int) -> None:
        """Nothing: the buffer grows with what is in it."""

    def append(self, pair: Pair, count: int, start: int = 0) -> None:
        """Encode `count` pages of keys and values [B, G, T, D], from token `start` on."""
        stop = start + count * self.config.page
        sides = zip(NAMES, self.codecs, pair, strict=True)
        codes = {name: code.encode(x[:, :, start:stop]) for name, code, x in sides}
        self._pages.append(exchange.to_records(codes, self.codecs), count)

    def read(self, start: int, stop: int) -> RecordPages:
        """A snapshot of pages start .. stop - 1; from the first page on it copies nothing."""
        buffer, *headers = self._pages.arrays() if not start else self._pages.read(start).values()
        tokens = (stop - start) * self.config.page
        return RecordPages(
            self.codecs, self.layouts, buffer, headers[0] if headers else None, tokens
        )

    def truncate(self, count: int) -> None:
        self._pages.truncate(count)

    def select(self, rows: torch.Tensor) -> None:
        """Rows of the batch, in this order."""
        state = {name: x[rows] for name, x in self._pages.read().items()}
        self._pages.restore(state, self.count)

    def arrays(self) -> list[torch.Tensor]:
        """What is allocated."""
        return self._pages.arrays()

    @property
    def state(self) -> Stored:
        return self._pages.read()

    def restore(self, state: dict, count: int) -> None:
        """Take over the `count` pages of a state of any store."""
        if "records" not in state:
            state = exchange.to_records(state, self.codecs)
        self._pages.restore(state, count)
