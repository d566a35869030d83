"""Bits by direction (`mlxkv.spec.mixed.fill`) and what could be added to them, by plain operations in float32.

A coder of one side holds its maps and tables: x [B, G, N, D] -> what is read back. Nested codes have a base of fewer
bits, of which each code is split by a refinement: a tree of cells, each level the mean of its cell for Gaussian
numbers (Lloyd), so that both the base and the whole lose little.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

import mlx.core as mx
import numpy as np

from mlxkv.formats import matrices
from mlxkv.formats.calibration import fill
from mlxkv.formats.lowrank import DIMS, ERRORS, GAINS, STEPS, Fill

FACTORS = (0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3)  # of a token's scale, searched
PAGE = 128
# Of the uniform quantizer with 32 and 64 levels (Max 1960, table II), and what 8 bits need no more.
LOST = ERRORS | {5: 0.003495, 6: 0.001041}
MOST = 2  # bits that a refinement adds to a direction


@dataclass(frozen=True)
class Filled:
    """How a page is coded. rate: bits a value, scales included. whole: of nested codes, base and refinement; 0: none.
    base: decode the base alone. searched: a token's scale is the one with the least weighted error. levels:
    learned for each width. diffuse: share of a value's error that the next token takes over. exact: tokens of a page
    of 128 that stay as they are. correct: most that scores lose for the noise of codes, nats. lost: most that they gain
    for directions without bits."""

    rate: float
    whole: float = 0.0
    base: bool = False
    searched: bool = False
    levels: bool = False
    diffuse: float = 0.0
    exact: int = 0
    correct: float = 0.0
    lost: float = 0.0

    @property
    def kept(self) -> Filled:
        """What is stored: corrections change scores alone."""
        return replace(self, correct=0.0, lost=0.0)


@dataclass(frozen=True)
class Directions:
    """One side of a layer: its balanced map [G, D, D] with sigma [G, D], falling, the mean of keys [G, 1, D] or None,
    and samples [G, N, D]."""

    name: str
    down: np.ndarray
    sigma: np.ndarray
    mean: np.ndarray | None
    samples: np.ndarray


class Coder:
    """One side of a layer at work. widths: bits of blocks of 16 directions. more: bits that a refinement adds to each
    of these and of further blocks."""

    def __init__(self, side: Directions, how: Filled, widths: fill.Widths, more: fill.Widths = ()):
        self.how, self.name = how, side.name
        self.mean = 0.0 if side.mean is None else mx.array(side.mean)
        both = [*widths, *[0] * (len(more) - len(widths))]
        self.runs = [
            (b, k, DIMS * len(list(same)))
            for (b, k), same in groupby(zip(both, more or [0] * len(both), strict=True))
        ]
        self.widths, self.more, self.stored = tuple(widths), tuple(more), DIMS * len(both)
        down, up, weights, start = [], [], [], 0
        back = np.linalg.inv(side.down.astype(np.float64))
        for _, _, count in self.runs:
            part, mix = slice(start, start + count), matrices.ordered(count)
            mean = side.sigma[:, part].astype(np.float64).mean(-1)[:, None, None]
            down.append(side.down[..., part].astype(np.float64) @ mix / np.sqrt(mean))
            up.append(mix.T @ back[:, part] * np.sqrt(mean))
            weights.append(np.broadcast_to(mean**2, (*mean.shape[:2], count)))
            start += count
        self.down, self.up, self.weights = (
            mx.array(np.concatenate(x, axis).astype(np.float32))
            for x, axis in ((down, -1), (up, -2), (weights, -1))
        )
        self.left = mx.array(back[:, start:].astype(np.float32)) if start < back.shape[-1] else None
        self.left_sigma = mx.array(side.sigma[:, start:].astype(np.float32))
        self.learned = self._learned(side) if how.levels else {}

    @property
    def bits(self) -> int:
        """Bits that a token of a head takes, without exact tokens: what is read of it, the base alone for `base`."""
        more = 0 if self.how.base else DIMS * sum(self.more)
        return 32 * Fill(1.0, self.widths).words + 16 + more

    def scale(self, x: mx.array) -> mx.array:
        """Return r [B, G, N, 1], the root mean square of the stored dims that the base has bits for."""
        known = x[..., : DIMS * len(self.widths)]
        return (
            mx.sqrt(mx.square(known).mean(-1, keepdims=True)).astype(mx.float16).astype(mx.float32)
        )

    def rounded(self, x: mx.array, scale: mx.array) -> mx.array:
        """Code stored x [..., R] and decode it, with this scale [..., 1]."""
        z, out, start = x / mx.maximum(scale, 1e-9), [], 0
        for bits, more, count in self.runs:
            part = z[..., start : start + count]
            if more:
                out.append(_tree(part, bits, more, self.how.base))
            elif bits in self.learned:
                out.append(_nearest(part, *self.learned[bits]))
            else:
                out.append(even(part, bits))
            start += count
        return mx.concatenate(out, -1) * scale

    def coded(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return x [B, G, N, D] as it is read back, and its scales [B, G, N, 1]."""
        stored = (x.astype(mx.float32) - self.mean) @ self.down
        scale = self.scale(stored)
        if self.how.diffuse and self.name == "values":
            got = self._diffused(stored, scale)
        elif self.how.searched:
            got = self._searched(stored, scale)
        else:
            got = self.rounded(stored, scale)
        return got @ self.up + self.mean, scale

    def _searched(self, x: mx.array, scale: mx.array) -> mx.array:
        best = least = None
        for factor in FACTORS:
            found = self.rounded(x, scale * factor)
            error = (mx.square(found - x) * self.weights).sum(-1, keepdims=True)
            if best is None:
                best, least = found, error
            else:
                best, least = mx.where(error < least, found, best), mx.minimum(error, least)
        return best

    def _diffused(self, x: mx.array, scale: mx.array) -> mx.array:
        pages = x.reshape(*x.shape[:2], -1, PAGE, x.shape[-1])
        scales = scale.reshape(*x.shape[:2], -1, PAGE, 1)
        rest, out = 0, []
        for t in range(PAGE):
            wanted = pages[..., t, :] + self.how.diffuse * rest
            got = self.rounded(wanted, scales[..., t, :])
            rest = wanted - got
            out.append(got)
        return mx.stack(out, axis=-2).reshape(x.shape)

    def shift(self, asked: mx.array, scale: mx.array, how: Filled) -> mx.array:
        """Return what is added to scores [B, G, M, N] of queries [B, G, M, D]: the noise of codes is taken away, the
        mass of directions without bits is given back, as `how` says."""
        out = mx.zeros((1,))
        if how.correct:
            turned = mx.square(asked @ self.up.swapaxes(-1, -2))
            lost = np.concatenate([np.full(n, LOST[b + k]) for b, k, n in self.runs])
            noise = (turned @ mx.array(lost.astype(np.float32)))[..., None] / 2
            noise = noise * mx.square(scale).swapaxes(-1, -2)  # of scores, [B, G, M, N], halved
            out = out - mx.minimum(noise, how.correct)
        if how.lost and self.left is not None:
            turned = mx.square(asked @ self.left.swapaxes(-1, -2))
            out = out + mx.minimum(
                (turned * self.left_sigma[:, None]).sum(-1, keepdims=True) / 2, how.lost
            )
        return out

    def _learned(self, side: Directions) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Fit levels of each width up to 4 bits to samples, from the even ones on: edges and levels, which are then
        spread until decoded numbers are as large as stored ones."""
        x = mx.array(side.samples[:, :4096]) - self.mean
        x = x.astype(mx.float32) @ self.down
        z, start, out = np.array(x / mx.maximum(self.scale(x), 1e-9)), 0, {}
        for bits, _, count in self.runs:
            if bits <= 4:
                part = z[..., start : start + count].reshape(-1)[::7][:60_000]
                out[bits] = _lloyd(part, np.ones_like(part), _even_levels(bits))
            start += count
        return out


def even(z: mx.array, bits: int) -> mx.array:
    """Round numbers of variance 1 as `fill` does."""
    top, step = (2**bits - 1) / 2, STEPS[bits]
    return (mx.clip(mx.round(z / step + top), 0, 2 * top) - top) * (step * GAINS[bits])


def _even_levels(bits: int) -> np.ndarray:
    return (np.arange(2**bits) - (2**bits - 1) / 2) * STEPS[min(bits, 4)]


def _lloyd(z, weight, levels, rounds: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Return edges and levels after Lloyd's rounds, levels spread so that decoded z has the second moment of z."""
    for _ in range(rounds):
        code = np.searchsorted((levels[1:] + levels[:-1]) / 2, z)
        total = np.bincount(code, weight, len(levels))
        found = np.bincount(code, weight * z, len(levels)) / np.maximum(total, 1e-12)
        levels = np.where(total > 1e-9, found, levels)
    edges = (levels[1:] + levels[:-1]) / 2
    code = np.searchsorted(edges, z)
    spread = np.sqrt((weight * z**2).sum() / (weight * levels[code] ** 2).sum())
    return edges, levels * spread


@lru_cache
def tree(bits: int, more: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the edges of 2^(bits + more) cells for Gaussian numbers, their levels, and for each the base's level.
    The base's cells are those that suit it best, and each is split in the way that suits it best."""
    z = np.linspace(-6, 6, 24001)
    weight = np.exp(-z * z / 2)
    if bits:
        cuts, base = _lloyd(z, weight, _even_levels(bits))
    else:
        cuts, base = np.empty(0), np.zeros(1)
    limits = [-np.inf, *cuts, np.inf]
    edges, levels = [], []
    for low, high in zip(limits[:-1], limits[1:], strict=True):
        here = (z > low) & (z <= high)
        part, own = z[here], weight[here]
        whole = np.cumsum(own) / own.sum()
        starts = np.interp((np.arange(2**more) + 0.5) / 2**more, whole, part)
        code_edges, _ = _lloyd(part, own, starts, 60)
        code = np.searchsorted(code_edges, part)
        levels += list(np.bincount(code, own * part) / np.bincount(code, own))
        edges += [*code_edges, high]
    edges, levels = np.array(edges[:-1]), np.array(levels)
    code = np.searchsorted(edges, z)
    spread = np.sqrt((weight * z**2).sum() / (weight * levels[code] ** 2).sum())
    return edges, levels * spread, base.repeat(2**more)


def _nearest(z: mx.array, edges: np.ndarray, levels: np.ndarray) -> mx.array:
    code = sum((z > float(edge)).astype(mx.int32) for edge in edges)
    return mx.array(levels.astype(np.float32))[code]


def _tree(z: mx.array, bits: int, more: int, base: bool) -> mx.array:
    edges, levels, rough = tree(bits, more)
    return _nearest(z, edges, rough if base else levels)


def coders(layers: dict[int, tuple[Directions, Directions]], how: Filled) -> dict[int, tuple]:
    """Return (keys, values) coders of each layer, all of one budget."""
    sides = [(one.name, one.sigma.astype(np.float64)) for pair in layers.values() for one in pair]
    widths = fill.allot(sides, how.rate)
    more = refined(sides, widths, how.whole - how.rate) if how.whole else [()] * len(sides)
    made = [
        Coder(one, how, w, k)
        for one, w, k in zip([s for p in layers.values() for s in p], widths, more, strict=True)
    ]
    return {index: (made[2 * i], made[2 * i + 1]) for i, index in enumerate(layers)}


def refined(sides, widths, rate: float) -> list[fill.Widths]:
    """Return the bits that a refinement adds to each block of 16 directions of each side, at `rate` bits a value: one
    bit after the other goes where it takes away most of the cost."""
    room = int(rate * sum(sigma.shape[1] for _, sigma in sides) // DIMS)
    have, added, costs = [], [], []
    for (name, sigma), own in zip(sides, widths, strict=True):
        blocks = sigma.shape[1] // DIMS
        costs.append(fill.weight(name, sigma) * (sigma**2).sum(0).reshape(blocks, DIMS).sum(-1))
        have.append([*own, *[0] * (blocks - len(own))])
        added.append([0] * blocks)
    for _ in range(room):
        best = max(
            (
                (cost[i] * (LOST[have[s][i] + k] - LOST[have[s][i] + k + 1]), s, i)
                for s, cost in enumerate(costs)
                for i, k in enumerate(added[s])
                if k < MOST and have[s][i] + k + 1 in LOST and have[s][i] < 8
            ),
            default=None,
        )
        if best is None:
            break
        added[best[1]][best[2]] += 1
    out = []
    for own, more in zip(widths, added, strict=True):
        while len(more) > len(own) and not more[-1]:
            more.pop()
        out.append(tuple(more))
    return out
