"""Where sealed pages live: `Codes` for plain ops, `kernels.Pool` for Triton. One cache, one of the two.

Both are stores that grow and are cut by whole pages, and hand out snapshots that attention reads.
Each restores what either of mlxkv's stores saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cuda_track import exchange
from cuda_track.calibrated import Rotations
from cuda_track.codec import Codec, Stored, codec
from cuda_track.pages import Pages
from mlxkv.config import CacheConfig

Pair = tuple[torch.Tensor, torch.Tensor]
NAMES = exchange.NAMES


@dataclass(frozen=True)
class CodePages:
    """Pages as plain ops read them. tokens: in these pages."""

    codecs: tuple[Codec, Codec]
    stored: tuple[Stored, Stored]
    tokens: int

    @property
    def parts(self) -> tuple[CodePages]:
        """Runs of one transform."""
        return (self,)

    def decode(self, side: int, dtype: torch.dtype) -> torch.Tensor:
        """Keys (side 0) or values (1) as attention sees them: [B, G, T, D]."""
        return self.codecs[side].decode(self.stored[side], dtype)


def codecs_of(
    config: CacheConfig, dims: tuple[int, int], rotations: Rotations | None, device: torch.device
) -> tuple[Codec, Codec]:
    """Of keys and of values, for heads of these dims."""
    made = rotations and rotations.to(device)
    return tuple(
        Codec(side, dim, config.page, getattr(made, name), device)
        if side.calibrated and made is not None
        else codec(side, dim, config.page, device)
        for name, side, dim in zip(NAMES, (config.keys, config.values), dims, strict=True)
    )


class Codes:
    """Sealed pages for plain ops: two sets of tensors."""

    def __init__(self, config: CacheConfig, codecs: tuple[Codec, Codec]):
        self.config, self.codecs = config, codecs
        self._pages = (Pages(), Pages())

    @property
    def count(self) -> int:
        return self._pages[0].count

    def make_room(self, pair: Pair, count: int) -> None:
        """Nothing: tensors grow with what is in them."""

    def append(self, pair: Pair, count: int, start: int = 0) -> None:
        """Encode `count` pages of keys and values [B, G, T, D], from token `start` on."""
        stop = start + count * self.config.page
        for pages, code, x in zip(self._pages, self.codecs, pair, strict=True):
            pages.append(code.encode(x[:, :, start:stop]), count)

    def read(self, start: int, stop: int) -> CodePages:
        """A snapshot of pages start .. stop - 1."""
        stored = tuple(pages.read(start, stop) for pages in self._pages)
        return CodePages(self.codecs, stored, (stop - start) * self.config.page)

    def truncate(self, count: int) -> None:
        for pages in self._pages:
            pages.truncate(count)

    def select(self, rows: torch.Tensor) -> None:
        """Rows of the batch, in this order."""
        for pages in self._pages:
            state = {name: x[rows] for name, x in pages.read().items()}
            pages.restore(state, pages.count)

    def arrays(self) -> list[torch.Tensor]:
        """What is allocated."""
        return [x for pages in self._pages for x in pages.arrays()]

    @property
    def state(self) -> dict[str, Stored]:
        return dict(zip(NAMES, (pages.read() for pages in self._pages), strict=True))

    def restore(self, state: dict, count: int) -> None:
        """Take over the `count` pages of a state of any store."""
        state = as_codes(state, self.codecs)
        for name, pages in zip(NAMES, self._pages, strict=True):
            pages.restore(state[name], count)


def as_codes(state: dict, codecs: tuple[Codec, Codec]) -> dict[str, Stored]:
    """Sealed pages of a saved cache, records or not, as the tensors that plain ops read.

    Raises KeyError or ValueError for anything else.
    """
    if "records" in state:
        return exchange.to_codes(state, codecs)
    for name, code in zip(NAMES, codecs, strict=True):
        if set(state[name]) != code.method.names(code.spec):
            raise ValueError(f"tensors {', '.join(sorted(state[name]))} for {name}")
    return state
