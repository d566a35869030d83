"""What attention reads of a cache: the view, and snapshots of quantized pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from cuda_track.codec.codec import Codec, QuantizedPages, Stored, both
from mlxkv.errors import UserError

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class CodePages(QuantizedPages):
    """Pages of plain ops."""

    codecs: tuple[Codec, Codec]
    stored: tuple[Stored, Stored]
    tokens: int


@dataclass(frozen=True)
class Parts:
    """Snapshots of runs of pages, in the order of their tokens."""

    parts: tuple[QuantizedPages, ...]

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    def decode(self, side: int, dtype: torch.dtype) -> torch.Tensor:
        """Decode keys (side 0) or values (1): [B, G, T, D]."""
        return torch.cat([part.decode(side, dtype) for part in self.parts], 2)


class Foreign(UserError, AttributeError):
    """A view met code that reads arrays."""

    def __init__(self):
        super().__init__(
            "[cache] attention that cannot read compressed caches; got one of an attached model, after "
            "detach or in another model; call attach(model, kv) first, or give the model its own cache"
        )


@dataclass(frozen=True)
class View:
    """A cache as it was after one update.

    recent, sink: (keys, values), each [B, G, T, D]. pages: between the two, or None. observer: attention calls
    it with (queries, scale, mask) once its output is computed.
    """

    recent: Pair
    sink: Pair | None = None
    pages: QuantizedPages | Parts | None = None
    observer: Callable[..., None] | None = field(default=None, repr=False)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise Foreign

    @classmethod
    def __torch_function__(cls, *args, **kwargs):
        raise Foreign

    @property
    def windows(self) -> list[Pair]:
        return [self.recent] if self.sink is None else [self.sink, self.recent]

    @property
    def tokens(self) -> int:
        pages = self.pages.tokens if self.pages else 0
        return pages + sum(keys.shape[2] for keys, _ in self.windows)

    def whole(self, dtype: torch.dtype) -> Pair:
        """Keys and values of all tokens in the model's domain, [B, G, T, D] each."""
        if self.sink is None and self.pages is None:
            return self.recent
        return both(lambda side: torch.cat(self.parts(side, dtype), 2), (0, 1))

    def parts(self, side: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Keys (side 0) or values (1) of sink, pages and recent, as far as there are any."""
        parts = [pair[side].to(dtype) for pair in self.windows]
        if self.pages is not None:
            parts.insert(-1, self.pages.decode(side, dtype))
        return parts
