"""Coders of pages, by plain operations in float32: x [B, G, N, D], N a multiple of 128 -> what is read back."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlxkv.codec.affine import clip_rows
from mlxkv.formats.affine import Affine

CLIPS = {2: 0.94, 3: 0.98, 4: 1.0}  # of values, as balanced presets have them
FACTORS = tuple(1 - i / 20 for i in range(12))  # of the range of a group, searched
GROUPS = 600  # that levels are fitted to
KEYS, VALUES = "keys", "values"


@dataclass(frozen=True)
class Maps:
    """Calibrated maps of a layer, each [G, D, D]: (down, up) of keys and of values, and levels in [-1, 1]."""

    keys: tuple[mx.array, mx.array]
    values: tuple[mx.array, mx.array]
    levels: dict[str, mx.array]


@dataclass(frozen=True)
class Codes:
    """How a page is coded. bits: a number's width. base: decode the first 2 of 4 nested bits. plain: groups of 64
    without maps, as `int4` has, instead of 128 behind balanced maps, as `int2`. searched: the range of a group is
    the one with the least error. levels: learned, not evenly spaced. diffuse: share of a value's error that the next
    token takes over. exact: tokens of a page of 128 that stay as they are. correct: most that a page's scores lose
    for the noise of its keys, nats."""

    bits: int = 2
    base: bool = False
    plain: bool = False
    searched: bool = False
    levels: bool = False
    diffuse: float = 0.0
    exact: int = 0
    correct: float = 0.0

    @property
    def kept(self) -> Codes:
        """What is stored: a correction changes scores alone."""
        return replace(self, correct=0.0)

    @property
    def read(self) -> float:
        """Bits read per number, with scale and bias of 16 bits a group."""
        bits = 2 if self.base else self.bits
        more = self.exact * (16 - bits) / 128
        return bits + 32 / (64 if self.plain else 128) + more


def grouped(x: mx.array, side: str, group: int) -> mx.array:
    """[B, G, N, D] -> [..., group]: tokens of a channel for keys, channels of a token for values."""
    *lead, tokens, dims = x.shape
    if side == KEYS:
        return x.reshape(*lead, tokens // group, group, dims).swapaxes(-1, -2)
    return x.reshape(*lead, tokens, -1, min(group, dims))


def ungrouped(x: mx.array, side: str, shape: tuple[int, ...]) -> mx.array:
    return (x.swapaxes(-1, -2) if side == KEYS else x).reshape(shape)


def even(x: mx.array, low: mx.array, high: mx.array, bits: int, base: bool = False) -> mx.array:
    """Round to 2^bits evenly spaced levels of [low, high]; base: to the middle of the cell that two bits say."""
    most = 2**bits - 1
    step = mx.maximum((high - low) / most, 1e-12)
    code = mx.clip(mx.round((x - low) / step), 0, most)
    if base:
        wide = 2 ** (bits - 2)
        code = mx.floor(code / wide) * wide + (wide - 1) / 2
    return low + code * step


def uneven(x: mx.array, low: mx.array, high: mx.array, levels: mx.array) -> mx.array:
    """Round to the nearest of `levels` in [-1, 1], stretched to [low, high]."""
    middle, half = (high + low) / 2, mx.maximum((high - low) / 2, 1e-12)
    z = (x - middle) / half
    edges = (levels[1:] + levels[:-1]) / 2
    code = sum((z > edge).astype(mx.int32) for edge in edges)
    return middle + half * levels[code]


def rounded(x: mx.array, how: Codes, levels: mx.array) -> tuple[mx.array, mx.array]:
    """Code groups [..., n]. Returns them decoded and the widths of their steps [..., 1]."""
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    middle, half = (low + high) / 2, (high - low) / 2
    best = least = width = None
    for factor in FACTORS if how.searched else (1.0,):
        a, b = middle - half * factor, middle + half * factor
        found = uneven(x, a, b, levels) if how.levels else even(x, a, b, how.bits, how.base)
        error = ((found - x) ** 2).mean(-1, keepdims=True)
        step = (b - a) / (2**how.bits - 1)
        if best is None:
            best, least, width = found, error, step
        else:
            better = error < least
            best, width = mx.where(better, found, best), mx.where(better, step, width)
            least = mx.minimum(error, least)
    return best, width


def _diffused(x: mx.array, how: Codes, levels: mx.array) -> mx.array:
    """Values [B, G, N, D], a token after the other within pages of 128, each with a share of the error before it."""
    pages = x.reshape(*x.shape[:2], -1, 128, x.shape[-1])
    rest, out = 0, []
    for t in range(128):
        wanted = pages[..., t, :] + how.diffuse * rest
        got = rounded(wanted, how, levels)[0]
        rest = wanted - got
        out.append(got)
    return mx.stack(out, axis=-2).reshape(x.shape)


def coded(x: mx.array, side: str, how: Codes, maps: Maps) -> tuple[mx.array, mx.array | None]:
    """Return x as it is read back, and for keys behind a map the steps [B, G, pages, D]."""
    x, levels = x.astype(mx.float32), maps.levels[side]
    if how.plain:
        parts = grouped(x, side, 64)
        return ungrouped(rounded(parts, how, levels)[0], side, x.shape), None
    down, up = getattr(maps, side)
    stored = x @ down
    if side == VALUES:
        dims = x.shape[-1]
        whole = stored
        if not (how.searched or how.levels):
            stored = clip_rows(stored, Affine(2, dims, clip=CLIPS[how.bits]).clip_rank(dims))
        if how.diffuse:
            return _diffused(stored, how, levels) @ up, None
        parts = grouped(stored, side, 128 if dims % 128 == 0 else dims)
        return ungrouped(rounded(parts, how, levels)[0], side, whole.shape) @ up, None
    got, width = rounded(grouped(stored, side, 128), how, levels)
    return ungrouped(got, side, stored.shape) @ up, width[..., 0]


class AffineCoder:
    """Keys and values of one layer."""

    def __init__(self, how: Codes, maps: Maps):
        self.how, self.maps = how, maps

    def coded(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array, mx.array | None]:
        keys, steps = coded(keys, KEYS, self.how, self.maps)
        return keys, coded(values, VALUES, self.how, self.maps)[0], steps


def _nearest(z: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return which of a few rising levels is the nearest: sums of comparisons take a tenth of a search's time."""
    return sum((z > edge).astype(np.int8) for edge in (levels[1:] + levels[:-1]) / 2)


def learned(samples: mx.array, side: str, down: mx.array, rounds: int = 12) -> mx.array:
    """Return four levels in [-1, 1] for groups of `samples` [G, N, D] behind `down`: Lloyd's rounds, the range of a
    group searched anew in each."""
    count = samples.shape[1] // 128 * 128
    x = grouped((samples[:, :count].astype(mx.float32) @ down)[None], side, 128)
    x = np.array(x.reshape(-1, x.shape[-1]))
    x = x[:: max(1, len(x) // GROUPS)][:GROUPS]
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    z = ((x - (low + high) / 2) / np.maximum((high - low) / 2, 1e-12)).astype(np.float32)
    levels = np.array([-1, -1 / 3, 1 / 3, 1.0])
    for _ in range(rounds):
        best, least = np.ones((len(z), 1)), np.full((len(z), 1), np.inf)
        for factor in FACTORS:
            near = levels[_nearest(z, levels * factor)] * factor
            error = ((near - z) ** 2).mean(-1, keepdims=True)
            best, least = np.where(error < least, factor, best), np.minimum(error, least)
        code = _nearest(z / best, levels)
        new = [
            ((z * best)[code == i].sum() / max((best**2 + 0 * z)[code == i].sum(), 1e-9))
            for i in range(4)
        ]
        levels = np.sort(np.array(new))
    return mx.array((levels / np.abs(levels).max()).astype(np.float32))
