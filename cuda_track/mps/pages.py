"""Quantized pages as mlxkv's page records: what Metal kernels read, and which caches they can read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cuda_track.codec import records
from cuda_track.codec.codec import Codec, QuantizedPages, Stored
from cuda_track.mps import source
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.records import NAMES, TOKENS, RecordLayout, side_layout, why_no_record


def why_not(config: CacheConfig, dims: tuple[int, int]) -> str | None:
    """Return why no Metal kernel reads caches of `config` with heads of these dims, or None."""
    if source.compiler() is None:
        return "no Metal here"
    if dims[0] != dims[1]:
        return f"keys of {dims[0]} and values of {dims[1]} dims have no kernel"
    if config.is_online:
        return "bases that follow the text have no kernel here"
    for side, dim, keys in zip((config.keys, config.values), dims, (True, False), strict=True):
        stored = side.dims(dim)
        if reason := why_no_record(side.quantizer, stored, config.page, keys):
            return reason
        at = side_layout(side.quantizer, stored, config.page, keys)
        if at.raw or at.tree:
            return "float16 pages and polar trees have no kernel here"
    return None


@dataclass(frozen=True)
class RecordPages(QuantizedPages):
    """A snapshot that attention reads: the first `tokens` / 16 records of `buffer`, [B, G, capacity, words], and
    the headers of the pages, if the format has any."""

    codecs: tuple[Codec, Codec]
    layout: RecordLayout
    buffer: torch.Tensor
    headers: torch.Tensor | None
    tokens: int

    @property
    def stored(self) -> tuple[Stored, Stored]:
        """The pages as plain ops read them."""
        state = {"records": self.buffer[:, :, : self.tokens // TOKENS]}
        if self.headers is not None:
            state["headers"] = self.headers[:, :, : self.tokens // self.codecs[0].page]
        codes = records.to_codes(state, self.codecs)
        return tuple(codes[name] for name in NAMES)
