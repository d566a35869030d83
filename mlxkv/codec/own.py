"""A quantizer of the caller's own: two functions over pages, by plain MLX ops, with the checks that a cache needs.

It has no spec, no records for kernels and no twin in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from mlxkv.errors import UserError, brief
from mlxkv.formats.quantizers import Quantizer

Stored = dict[str, mx.array]
PAGES = 3  # of the trial: usual values, zeros, large ones
LARGE = 100.0
TRIED = f"a page of usual values, one of zeros, one of values around {LARGE:g}"
SAME = 0.01  # rms, relative: a page alone against the same page among others


@dataclass(frozen=True)
class Method(Quantizer):
    """Compare a quantizer of your own: two functions of MLX arrays, the same for all layers and kv heads.

    Give it to `mlxkv.load`, `attach` or `eval` in place of a preset, or to one `Side` of a `CacheConfig`. It is tried
    on a few pages first. Caches that it fills cannot be read from files.

    name: in reports.
    encode: function of x [P, page, D] float32, each a page of tokens of one kv head, that returns a dict of arrays
        [P, ...]. A page is encoded when it is full, by itself.
    decode: function of such a dict that returns x again, [P, page, D], finite for zeros, too.
    bits: per value, scales included, that the arrays would take if they were packed; by default what they take.

    Raises UserError for arguments of other kinds.
    """

    method: ClassVar[str] = "own"

    name: str
    encode: Callable[[mx.array], dict[str, mx.array]]
    decode: Callable[[dict[str, mx.array]], mx.array]
    bits: float | None = None

    def __post_init__(self):
        given: dict[str, Any] = vars(self)
        for what in ("encode", "decode"):
            if not callable(given[what]):
                raise UserError(f"[Method] {what} is no function; got {given[what]!r}; pass one")
        if not isinstance(given["name"], str) or not self.name:
            raise UserError(f"[Method] no name for reports; got {given['name']!r}; pass a text")
        if self.bits is not None and not 0 < self.bits <= 32:
            raise UserError(
                f"[Method] bits per value are above 0 and at most 32; got {self.bits}; leave them "
                "out to count those of the arrays"
            )

    def describe(self, bits: str | None = None) -> str:
        return self.name

    @property
    def tensors(self) -> set[str]:
        """The tensor of pages: all arrays of a page as bytes, uint8 [B, G, P, W]."""
        return {"pages"}

    def bits_per_value(self, dims: int, page: int) -> float:
        """Return `bits`, or those of the arrays. Raises UserError if the method cannot be used."""
        size = 8 * sum(part.size for part in form(self, dims, page).values()) / (dims * page)
        return size if self.bits is None else self.bits


class _Part(NamedTuple):
    """One array of a page. shape: without P. size: bytes."""

    shape: tuple[int, ...]
    dtype: mx.Dtype
    size: int


@lru_cache(maxsize=256)
def form(quantizer: Method, dims: int, page: int) -> dict[str, _Part]:
    """Return the arrays of a page of `page` tokens and `dims` stored dims, once the method has passed a trial.
    Raises UserError."""
    x = mx.random.normal((PAGES, page, dims), key=mx.random.key(0))
    x = x * mx.array([1.0, 0.0, LARGE])[:, None, None]
    stored = _encoded(quantizer, x)
    decoded = _decoded(quantizer, stored, x.shape)
    alone = _decoded(quantizer, _encoded(quantizer, x[:1]), x[:1].shape)
    gap, size = mx.square(alone - decoded[:1]).mean(), mx.square(alone).mean()
    if (gap > SAME**2 * size).item():
        raise UserError(
            f"[Method] {quantizer.name} encodes a page otherwise among others; got another result for {PAGES} pages "
            "than for one; take no statistics over axis 0, and draw no random numbers"
        )
    zeros = {name: mx.zeros_like(y) for name, y in stored.items()}  # as spare capacity holds
    _decoded(quantizer, zeros, x.shape, "arrays of zeros")
    return {
        name: _Part(y.shape[1:], y.dtype, prod(y.shape[1:]) * y.dtype.size)
        for name, y in stored.items()
    }


def _encoded(quantizer: Method, x: mx.array) -> Stored:
    """Return what `encode` makes of x [P, page, D], checked. Raises UserError."""
    who, out = f"[Method] {quantizer.name}: encode", _called(quantizer, "encode", x)
    kind = type(out).__name__
    stored: Stored = dict(out) if isinstance(out, dict) else {}  # pyright: ignore[reportUnknownArgumentType]
    if not stored or not all(map(_is_array, stored.values())):
        raise UserError(f"{who} returns no dict of arrays; got {kind}; return arrays by name")
    for name, y in stored.items():
        if y.shape[:1] != x.shape[:1]:
            raise UserError(
                f"{who} returns {name!r} of another number of pages; got shape {y.shape} for x of {x.shape}; keep "
                "axis 0"
            )
    return stored


def _decoded(
    quantizer: Method, stored: Stored, shape: tuple[int, ...], of: str = TRIED
) -> mx.array:
    """Return what `decode` makes of a dict in float32, checked. of: what it holds. Raises UserError."""
    who, out = f"[Method] {quantizer.name}: decode", _called(quantizer, "decode", stored)
    if not _is_array(out) or out.shape != shape:
        got = f"shape {out.shape}" if _is_array(out) else type(out).__name__
        raise UserError(f"{who} returns another shape; got {got}; return {shape}")
    out = out.astype(mx.float32)
    if not mx.isfinite(out).all().item():
        raise UserError(
            f"{who} returns NaN or infinity; got {of}; divide by no scale of 0, and keep what float16 holds"
        )
    return out


def _called(quantizer: Method, what: str, x: Any) -> Any:
    """Return the result of a function of the caller's, computed. Raises UserError."""
    try:
        out: Any = getattr(quantizer, what)(x)
        mx.eval(out)  # pyright: ignore[reportUnknownMemberType]
    except Exception as error:
        raise UserError(
            f"[Method] {quantizer.name}: {what} fails; got {type(error).__name__}: {brief(error)}; try it on pages "
            "[P, page, D]"
        ) from error
    return out


def _is_array(x: object) -> bool:
    return isinstance(x, mx.array)


def encode(quantizer: Method, x: mx.array, page: int) -> Stored:
    """Encode x [B, G, T, R], T a whole number of pages: the bytes of all arrays, [B, G, P, W]."""
    parts = form(quantizer, x.shape[-1], page)
    stored = quantizer.encode(mx.reshape(x.astype(mx.float32), (-1, page, x.shape[-1])))
    each = [mx.reshape(_bytes(stored[name]), (-1, part.size)) for name, part in parts.items()]
    return {"pages": mx.reshape(mx.concatenate(each, axis=-1), (*x.shape[:2], -1, _width(parts)))}


def decode(quantizer: Method, stored: Stored, dims: int, page: int, dtype: mx.Dtype) -> mx.array:
    """Decode to [B, G, T, R] in `dtype`."""
    parts = form(quantizer, dims, page)
    rows = mx.reshape(stored["pages"], (-1, _width(parts)))
    arrays: Stored = {}
    at = 0
    for name, part in parts.items():
        own = mx.contiguous(rows[:, at : at + part.size]).view(part.dtype)
        arrays[name], at = mx.reshape(own, (-1, *part.shape)), at + part.size
    out = quantizer.decode(arrays)
    return mx.reshape(out, (*stored["pages"].shape[:2], -1, dims)).astype(dtype)


def _bytes(x: mx.array) -> mx.array:
    return mx.contiguous(x[:, None] if x.ndim == 1 else x).view(mx.uint8)


def _width(parts: dict[str, _Part]) -> int:
    return sum(part.size for part in parts.values())
