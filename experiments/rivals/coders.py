"""Code vectors and decode them at once, by plain operations in float32. Spec: `mlxkv.spec.mixed.transform_coding`.

A coder maps x [B, G, T, D] to what a cache would give back, and knows its bits per number, headers included,
without maps, means and codebooks, which belong to the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxkv.codec.codec import Codec
from mlxkv.codec.transform import Transform
from mlxkv.formats import matrices
from mlxkv.formats.affine import Affine
from mlxkv.formats.calibration import balance
from mlxkv.formats.config import Side
from mlxkv.spec.mixed import transform_coding as spec

HEADER = 16  # bits of one number in float16


@dataclass(frozen=True)
class Coder:
    """code: x -> decoded x. bits: per number."""

    code: Callable[[mx.array], mx.array]
    bits: float


@dataclass(frozen=True)
class Fit:
    """What a calibration says of one side of a layer, float64, G kv heads.

    rows: keys or values [G, N, D]. noise: their second moment; reads: that of queries, or of the output projection
    [G, D, D]. rotation: OSCAR's [G, D, D].
    """

    rows: np.ndarray
    noise: np.ndarray
    reads: np.ndarray
    rotation: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """[G, 1, D]"""
        return self.rows.mean(1, keepdims=True)

    @property
    def covariance(self) -> np.ndarray:
        """[G, D, D]"""
        gone = self.rows - self.mean
        return gone.swapaxes(-1, -2) @ gone / gone.shape[1]

    def regular(self, centred: bool) -> tuple[np.ndarray, np.ndarray]:
        """Noise and reads of full rank."""
        noise = self.covariance if centred else self.noise
        return balance.shrunk(noise)[0], balance.shrunk(self.reads)[0]


def _single(*arrays: np.ndarray) -> tuple[mx.array, ...]:
    return tuple(mx.array(x.astype(np.float32)) for x in arrays)


def _around(fit: Fit, centred: bool) -> mx.array:
    """The mean [G, 1, D] to take away, or zeros."""
    return _single(fit.mean if centred else 0 * fit.mean)[0]


def affine(fit: Fit, down: np.ndarray, clip: float, bits: int = 2, centred: bool = False) -> Coder:
    """Min-max codes of a whole token after an invertible map down [G, D, D], as `Affine(bits, D)` stores them."""
    dims = down.shape[-1]
    there, back = _single(down, np.linalg.inv(down))
    side = Side(Affine(bits, dims, clip=clip))
    codec = Codec(side, dims, 16, own=Transform(there, back))
    mean = _around(fit, centred)

    def code(x: mx.array) -> mx.array:
        return codec.decode(codec.encode(x.astype(mx.float32) - mean), mx.float32) + mean

    return Coder(code, side.quantizer.bits_per_value(dims, 16))


def rotated(fit: Fit, clip: float, centred: bool = False) -> Coder:
    """OSCAR's rotation; centred: OptR's key reparametrization before it."""
    return affine(fit, fit.rotation, clip, centred=centred)


def balanced(fit: Fit, clip: float, centred: bool = False) -> Coder:
    """Balanced maps; centred: of what is left of keys without their mean."""
    noise, reads = fit.covariance if centred else fit.noise, fit.reads
    down, _, _ = balance.balance(noise, reads)
    return affine(fit, balance.mixed(down, matrices.PARTS)[0], clip, centred=centred)


def flat(fit: Fit, power: float, clip: float) -> Coder:
    """Partly whitened keys, the direction that queries read most in 16 bits, the others at two bits."""
    pairs = [
        spec.partly_whitened(*both, power)[0] for both in zip(*fit.regular(False), strict=True)
    ]
    down = np.stack(pairs)
    dims = down.shape[-1]
    there, back = _single(down, np.linalg.inv(down))
    side = Side(Affine(2, dims, clip=clip))
    codec = Codec(side, dims - 1, 16)

    def code(x: mx.array) -> mx.array:
        stored = x.astype(mx.float32) @ there
        first, rest = stored[..., :1].astype(mx.float16), stored[..., 1:]
        rest = codec.decode(codec.encode(rest), mx.float32)
        return mx.concatenate([first.astype(mx.float32), rest], -1) @ back

    return Coder(code, (2 * (dims - 1) + HEADER + 2 * HEADER) / dims)


def grouped(fit: Fit, rounds: int = 25) -> Coder:
    """NOVA-KV's keys: the mean removed, the attention map, a codebook of float8 numbers for every four."""
    maps = [spec.attention_map(*both)[0] for both in zip(*fit.regular(True), strict=True)]
    dims = fit.rows.shape[-1]
    down = np.stack(maps)[..., spec.stratified(dims)]
    stored = (fit.rows - fit.mean) @ down
    stored /= np.sqrt((stored**2).mean(-1, keepdims=True))
    parts = stored.reshape(*stored.shape[:2], -1, spec.GROUP)
    books = np.stack(
        [
            [
                spec.fp8(spec.codebook(head[:, g], spec.CENTROIDS, rounds))
                for g in range(parts.shape[2])
            ]
            for head in parts
        ]
    )  # [G, D / E, size, E]
    there, back, centres = _single(down, np.linalg.inv(down), books)
    squares, mean = (centres**2).sum(-1)[:, None], _around(fit, True)

    def code(x: mx.array) -> mx.array:
        stored = (x.astype(mx.float32) - mean) @ there  # [B, G, T, D]
        scale = mx.sqrt((stored**2).mean(-1, keepdims=True)).astype(mx.float16).astype(mx.float32)
        rows = stored / mx.where(scale > 0, scale, 1)
        out = []
        for one in rows.reshape(-1, *rows.shape[1:]):  # of the batch
            split = one.reshape(*one.shape[:2], -1, spec.GROUP).swapaxes(1, 2)  # [G, D / E, T, E]
            far = squares.swapaxes(1, 2) - 2 * split @ centres.swapaxes(-1, -2)
            nearest = mx.argmin(far, -1)[..., None]
            found = mx.take_along_axis(centres, mx.broadcast_to(nearest, split.shape), 2)
            out.append(found.swapaxes(1, 2).reshape(one.shape))
        return mx.stack(out) * scale @ back + mean

    return Coder(code, np.log2(spec.CENTROIDS) / spec.GROUP + HEADER / dims)


def errors_of_levels(dims: int) -> np.ndarray:
    """The squared error of the cells of `spec.levels_encode` for 0 to MOST bits, of white Gaussian rows."""
    x = np.random.default_rng(0).standard_normal((2000, dims))
    out = [1.0]
    for count in range(1, spec.MOST + 1):
        bits = np.full(dims, count)
        out.append(((spec.levels_decode(*spec.levels_encode(x, bits), bits) - x) ** 2).mean())
    return np.array(out)


def allotted(fit: Fit, rate: float) -> tuple[Coder, np.ndarray]:
    """Bits by direction, `rate` a number without the scale of a token. Also returns them, [G, D].

    Directions and variances are those of the attention map; all kv heads of a layer share one budget.
    """
    found = [spec.attention_map(*both) for both in zip(*fit.regular(True), strict=True)]
    down, variances = (np.stack(x) for x in zip(*found, strict=True))
    heads, dims = variances.shape
    bits = spec.water_filling(
        variances.reshape(-1), round(rate * heads * dims), errors_of_levels(dims)
    )
    bits = bits.reshape(heads, dims)
    white = down / np.sqrt(variances)[:, None]
    there, back, cells = _single(white, np.linalg.inv(white), 2.0 ** bits[:, None])
    kept, mean = mx.array(bits[:, None] > 0), _around(fit, True)

    def code(x: mx.array) -> mx.array:
        stored = mx.where(kept, (x.astype(mx.float32) - mean) @ there, 0)
        scale = mx.abs(stored).max(-1, keepdims=True).astype(mx.float16).astype(mx.float32)
        place = stored / mx.where(scale > 0, scale, 1)
        codes = mx.clip(mx.floor((place + 1) / 2 * cells), 0, cells - 1)
        return mx.where(kept, (2 * codes + 1) / cells - 1, 0) * scale @ back + mean

    return Coder(code, bits.mean() + HEADER / dims), bits
