"""A side at work: its transform and its method, for heads of one size."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TypeVar

import torch

from cuda_track.codec import packing, transform
from cuda_track.codec.transform import Transform
from mlxkv.formats.config import Side
from mlxkv.formats.quantizers import Quantizer

Stored = dict[str, torch.Tensor]
X = TypeVar("X")
Y = TypeVar("Y")


def method(quantizer: Quantizer) -> ModuleType:
    """Return the module of this package that encodes and decodes a quantizer.

    It has `encode` and `decode`. It may have `join`, which packs codes of one width as pages hold them.
    """
    return import_module(f"cuda_track.codec.{quantizer.file or quantizer.method}")


def both(make: Callable[[X], Y], pair: tuple[X, X]) -> tuple[Y, Y]:
    """Return what `make` makes of each of a pair: of keys and of values."""
    keys, values = pair
    return make(keys), make(values)


class Codec:
    """Encodes and decodes pages of vectors of D values, stored as R.

    dims: D; the attribute holds R. page: tokens per page. transform: the transform of a calibrated side,
    which belongs to one layer.
    """

    def __init__(
        self,
        side: Side,
        dims: int,
        page: int,
        side_transform: Transform | None = None,
        device: torch.device = torch.device("cpu"),
    ):
        self.quantizer, self.page, self.method = side.quantizer, page, method(side.quantizer)
        self.transform = side_transform or transform.make(side.transform, dims, side.seed, device)
        self.dims = dims if self.transform is None else self.transform.down.shape[-1]

    def __deepcopy__(self, memo) -> Codec:
        return self  # holds no state: copies of a cache share it

    def __getstate__(self) -> dict:
        return {**vars(self), "method": None}  # a module: it does not pickle

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, method=method(state["quantizer"]))

    def encode(self, x: torch.Tensor) -> Stored:
        """Encode x [B, G, T, D], whole pages; tokens, or groups of tokens, stay on axis 2."""
        return self.method.encode(self.quantizer, self.store(x), self.page)

    def store(self, x: torch.Tensor) -> torch.Tensor:
        """Transform x [B, G, T, D] into the values that are encoded, [B, G, T, R]."""
        return x if self.transform is None else self.transform.store(x)

    def decode_stored(self, stored: Stored, dtype: torch.dtype) -> torch.Tensor:
        """Decode without transforming back: [B, G, T, R] in `dtype`."""
        return self.method.decode(self.quantizer, stored, self.dims, self.page, dtype)

    def decode(self, stored: Stored, dtype: torch.dtype) -> torch.Tensor:
        """Decode the vectors that attention sees: [B, G, T, D] in `dtype`."""
        if self.transform is None:
            return self.decode_stored(stored, dtype)
        return self.transform.restore(self.decode_stored(stored, torch.float32)).to(dtype)

    def query(self, q: torch.Tensor) -> torch.Tensor:
        """Transform queries q [B, G, N, D] into the stored domain: [B, G, N, R] float32."""
        return q.float() if self.transform is None else self.transform.query(q)

    def scores(self, q: torch.Tensor, stored: Stored) -> torch.Tensor:
        """Multiply q [B, G, N, D] with every stored token: [B, G, N, T] float32."""
        return self.query(q) @ self.decode_stored(stored, torch.float32).mT

    def mix(self, p: torch.Tensor, stored: Stored) -> torch.Tensor:
        """Sum the stored tokens with weights p [B, G, N, T]: [B, G, N, D] float32."""
        x = p.float() @ self.decode_stored(stored, torch.float32)
        return x if self.transform is None else self.transform.restore(x)

    def join(self, codes: torch.Tensor, numbers: Stored) -> Stored:
        """Pack the codes of page records [B, G, T, R] as pages hold them, beside their other tensors."""
        if hasattr(self.method, "join"):
            return self.method.join(self.quantizer, codes, numbers)
        bits = self.quantizer.code_bits
        assert bits is not None  # of methods without a `join`
        return {**numbers, "codes": packing.pack(codes, bits)}

    @property
    def is_square(self) -> bool:
        """Return whether attention may stay in the stored domain: no rank is lost. False for a basis that
        follows the text: a copy of it in each dtype would be kept, and there are ever more."""
        if self.transform is None:
            return True
        return self.transform.down.ndim < 4 and len(set(self.transform.down.shape[-2:])) == 1


class QuantizedPages:
    """Quantized pages as attention reads them: one run, of one transform.

    codecs: of keys and of values. stored: their codes as plain ops read them. tokens: in these pages.
    """

    codecs: tuple[Codec, Codec]
    stored: tuple[Stored, Stored]
    tokens: int

    @property
    def parts(self) -> tuple[QuantizedPages, ...]:
        """Runs of one transform."""
        return (self,)

    def decode(self, side: int, dtype: torch.dtype) -> torch.Tensor:
        """Decode keys (side 0) or values (1): [B, G, T, D]."""
        return self.codecs[side].decode(self.stored[side], dtype)


@cache
def codec(side: Side, dims: int, page: int, device: torch.device) -> Codec:
    """Return the codec of a side that is not calibrated, shared by all layers."""
    return Codec(side, dims, page, device=device)
