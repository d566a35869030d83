"""Transforms, the (down, up) pair of a side, and functions that make them.

stored = x @ down [D, R], x = stored @ up [R, D]; both float32. Attention transforms the query once (`q @ up^T`) and
the output once (`o @ up`), so the inner loop reads only codes. Spec: `spec.affine.transform`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from mlxkv.formats import matrices
from mlxkv.formats.config import SCALED
from mlxkv.formats.matrices import signs

SRFT = "srft"
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Transform:
    """down: [D, R] or [G, D, R]; up: [R, D] or [G, R, D]; float32.

    kind: fast form that quantizing may use in place of `down`, "" for none. table: its float32 constants: D signs
        with the norm; for "srft" also (cos, -sin) of D steps of a circle; for "srft-scaled" then D scales.
    """

    down: mx.array
    up: mx.array
    kind: str = ""
    table: mx.array | None = None

    def store(self, x: mx.array) -> mx.array:
        """Transform x [B, G, T, D] into the stored domain, [B, G, T, R] float32."""
        return x.astype(mx.float32) @ self.down

    def restore(self, c: mx.array) -> mx.array:
        """Invert `store`: c [B, G, T, R] to [B, G, T, D] float32."""
        return c.astype(mx.float32) @ self.up

    def query(self, q: mx.array) -> mx.array:
        """Transform q [B, G, N, D] to [B, G, N, R] float32, such that q . restore(c) = query(q) . c."""
        return q.astype(mx.float32) @ self.up.swapaxes(-1, -2)

    def apply(self, x: mx.array) -> mx.array:
        """Apply `store` in the dtype of x: [B, G, T, D] -> [B, G, T, R]."""
        return x @ _cast(self, x.dtype)[0]

    def transform_query(self, q: mx.array) -> mx.array:
        """Apply `query` in the dtype of q: [B, G, N, D] -> [B, G, N, R]."""
        return q @ _cast(self, q.dtype)[1].swapaxes(-1, -2)

    def inverse(self, x: mx.array) -> mx.array:
        """Apply `restore` in the dtype of x: [B, G, T, R] -> [B, G, T, D]."""
        return x @ _cast(self, x.dtype)[1]

    def scaled(self, scale: mx.array) -> Transform:
        """Append a per-channel scale [R] (or [G, 1, R]): SRFT paper, section 7.1."""
        if scale.ndim > 1:
            return Transform(self.down * scale, self.up / scale.swapaxes(-1, -2))
        pair = self.down * scale, self.up / scale[:, None]
        if self.kind != SRFT or self.table is None:
            return Transform(*pair)
        return Transform(*pair, SCALED, mx.concatenate([self.table, scale]))


@dataclass(frozen=True, eq=False)
class KeyMean:
    """Calibrated mean [G, 1, D] float32 of a layer's keys, subtracted from every key as it arrives.

    Attention needs no correction: q . (k - mean) is q . k minus a constant per query, and softmax is invariant to
    it, provided that the mean is subtracted from every key, those of the exact windows included. Spec:
    `mlxkv.spec.balanced`.
    """

    mean: mx.array

    def subtract_from(self, keys: mx.array) -> mx.array:
        """Subtract the mean from keys [B, G, L, D], in their dtype."""
        return (keys.astype(mx.float32) - self.mean).astype(keys.dtype)


def subtract_mean(key_mean: KeyMean | None, keys: mx.array) -> mx.array:
    """Apply `KeyMean.subtract_from`; return `keys` unchanged if `key_mean` is None."""
    return keys if key_mean is None else key_mean.subtract_from(keys)


def kept_with(
    make: Callable[Concatenate[Transform, P], T],
) -> Callable[Concatenate[Transform, P], T]:
    """Cache the result of `make` for a Transform until the transform is freed.

    Transforms that follow the text are many, and each is useless once it is replaced.
    """
    by_transform: WeakKeyDictionary[Transform, dict[tuple[object, ...], T]] = WeakKeyDictionary()

    @wraps(make)
    def of(transform: Transform, *arguments: P.args, **options: P.kwargs) -> T:
        results = by_transform.setdefault(transform, {})
        if arguments not in results:
            results[arguments] = make(transform, *arguments, **options)
        return results[arguments]

    return of


@kept_with
def _cast(transform: Transform, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    return transform.down.astype(dtype), transform.up.astype(dtype)


def _orthogonal(down: np.ndarray, kind: str, table: np.ndarray) -> Transform:
    pair = mx.array(down.astype(np.float32)), mx.array(down.T.astype(np.float32))
    return Transform(*pair, kind, mx.array(table.astype(np.float32)))


def hadamard(dims: int, seed: int) -> Transform:
    """Return the sign-randomised Hadamard transform: entry (i, j) is sign_i (-1)^popcount(i & j) / sqrt(D)."""
    sign = signs(dims, seed)
    return _orthogonal(sign[:, None] * matrices.hadamard(dims), "hadamard", sign / np.sqrt(dims))


def srft(dims: int, seed: int) -> Transform:
    """Return the sign-randomised real FFT, packed as (DC, Nyquist), then sqrt(2) (cos, -sin) per bin."""
    sign, circle = signs(dims, seed), np.exp(-2j * np.pi * np.arange(dims) / dims)
    table = np.concatenate([sign / np.sqrt(2 * dims), circle.view(np.float64)])
    return _orthogonal(sign[:, None] * matrices.fourier(dims), SRFT, table)


def random(dims: int, seed: int) -> Transform:
    """Return the random rotation (TurboQuant, Alg. 1) shared by all layers and heads of these dims."""
    down = matrices.random(dims, seed).astype(np.float32)
    return Transform(mx.array(down), mx.array(np.ascontiguousarray(down.T)))


MAKERS = {"hadamard": hadamard, SRFT: srft, "random": random}


@cache
def make(name: str, dims: int, seed: int) -> Transform | None:
    """Return the transform called `name`, shared by all layers of these dims; None for "none".

    Raises UserError for calibrated ones such as "oscar", whose matrices come from a calibration
    (`mlxkv.codec.maps`).
    """
    if name == "none":
        return None
    return MAKERS[matrices.computed(name, dims)](dims, seed)
