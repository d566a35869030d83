"""Codec of one side: its transform and its quantizer, for heads of one size."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import mlx.core as mx

from mlxkv.codec import packing, transform
from mlxkv.codec.transform import Transform
from mlxkv.formats.config import Side
from mlxkv.formats.quantizers import Full, Quantizer

Stored = dict[str, mx.array]


def method(quantizer: Quantizer) -> ModuleType:
    """Return the module of this package that encodes and decodes a quantizer.

    It defines `encode` and `decode`. Optional: `scores` and `mix`, which multiply codes without decoding them, and
    `split` and `join`, which convert stored tensors to codes of one width and back, for page records.
    """
    return import_module(f"mlxkv.codec.{quantizer.file or quantizer.method}")


class Codec:
    """Encode and decode pages of one side.

    dims: head dim D of the vectors as an argument, stored dims R as an attribute. page: tokens per
    page. own: the transform of a calibrated side, which belongs to one layer.
    """

    def __init__(self, side: Side, dims: int, page: int, own: Transform | None = None):
        self.quantizer = side.quantizer if dims else Full()  # latents without rotary keys
        self.page = page
        self.method = method(self.quantizer)
        self.transform = own or transform.make(side.transform, dims, side.seed)
        self.dims = dims if self.transform is None else self.transform.down.shape[-1]

    def __deepcopy__(self, memo: dict[int, object]) -> Codec:
        return self  # constant: copies of a cache share it

    def encode(self, x: mx.array) -> Stored:
        """Encode x [B, G, T, D], T a whole number of pages: arrays with tokens (or groups of tokens) on axis 2."""
        return self.method.encode(self.quantizer, self.store(x), self.page)

    def store(self, x: mx.array) -> mx.array:
        """Transform x [B, G, T, D] to the values to be quantised, [B, G, T, R]."""
        return x if self.transform is None else self.transform.store(x)

    def work_dtype(self, dtype: mx.Dtype) -> mx.Dtype:
        """Return the dtype to decode codes in for `restore`.

        float16 is more precise than bfloat16, with the same scratch.
        """
        if self.transform is None:
            return dtype
        return mx.float32 if dtype == mx.float32 else mx.float16

    def restore(self, x: mx.array, dtype: mx.Dtype) -> mx.array:
        """Return the inverse of `store` for decoded values: [B, G, T, R] -> [B, G, T, D] in `dtype`."""
        return (
            x if self.transform is None else (x @ self.transform.up.astype(x.dtype)).astype(dtype)
        )

    @property
    def square_transform(self) -> Transform | None:
        """The transform, where it is square, so that attention may stay in the stored domain. None for one
        that follows the text: it would be cast again after every update."""
        square = self.transform is not None and len(set(self.transform.down.shape[-2:])) == 1
        return self.transform if square and not self.is_online else None

    @property
    def is_online(self) -> bool:
        """Return whether the transform belongs to one cache and follows the text: [B, G, D, R]."""
        return self.transform is not None and self.transform.down.ndim == 4

    def decode_stored(self, stored: Stored, dtype: mx.Dtype) -> mx.array:
        """Decode without the inverse transform: [B, G, T, R] in `dtype`."""
        return self.method.decode(self.quantizer, stored, self.dims, self.page, dtype)

    def decode(self, stored: Stored, dtype: mx.Dtype) -> mx.array:
        """Return the vectors that attention sees: [B, G, T, D] in `dtype`."""
        work = self.work_dtype(dtype)
        return self.restore(self.decode_stored(stored, work), dtype)

    def scores(self, q: mx.array, stored: Stored) -> mx.array:
        """Return q . k^ for every stored token, [B, G, N, T] float32, of q [B, G, N, D]."""
        q = q.astype(mx.float32) if self.transform is None else self.transform.query(q)
        if hasattr(self.method, "scores"):  # without decoding
            return self.method.scores(self.quantizer, q, stored, self.dims, self.page)
        return q @ self.decode_stored(stored, mx.float32).swapaxes(-1, -2)

    def mix(self, p: mx.array, stored: Stored) -> mx.array:
        """Return sum_t p_t v^_t, [B, G, N, D] float32, of p [B, G, N, T]."""
        p = p.astype(mx.float32)
        if hasattr(self.method, "mix"):
            x = self.method.mix(self.quantizer, p, stored, self.dims, self.page)
        else:
            x = p @ self.decode_stored(stored, mx.float32)
        return x if self.transform is None else self.transform.restore(x)

    def split(self, stored: Stored) -> tuple[mx.array, Stored]:
        """Return the codes [B, G, T, R] of pages, one per dim, and their other tensors."""
        if hasattr(self.method, "split"):
            return self.method.split(self.quantizer, stored, self.dims, self.page)
        bits = self.quantizer.code_bits
        assert bits is not None  # methods without `split` have one width
        return packing.unpack(stored["codes"], bits, self.dims), stored

    def join(self, codes: mx.array, numbers: Stored) -> Stored:
        """Invert `split`."""
        if hasattr(self.method, "join"):
            return self.method.join(self.quantizer, codes, numbers)
        bits = self.quantizer.code_bits
        assert bits is not None
        return {"codes": packing.pack(codes, bits), **numbers}


@cache
def codec(side: Side, dims: int, page: int) -> Codec:
    """Return the codec of a side without calibration, shared by all layers."""
    return Codec(side, dims, page)
