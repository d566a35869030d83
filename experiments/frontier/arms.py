"""Arms: what a decode step reads of the pages of a prompt, and how attention goes on with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from experiments.frontier.coding import KEYS, VALUES, Codes, Maps, coded
from experiments.frontier.engine import Memory
from experiments.frontier.ranking import SUMMARIES, taken

BASE = Codes(4, base=True)
HELD = 3  # codes whose pages stay with a prompt
LESS = float("-inf")


@dataclass(frozen=True)
class Arm:
    """codes: of all pages, or None for exact ones. rank: one of SUMMARIES, "" to read all pages. share: of the
    pages that are read. page: tokens of one. rest: what stands for the others: "drop", "mean" (their mean value
    with their estimated mass), "cross" (also how values go with keys), or "base" (the first two of nested bits)."""

    name: str
    codes: Codes | None = None
    rank: str = ""
    share: float = 1.0
    page: int = 64
    rest: str = "drop"

    @property
    def bits(self) -> float:
        """Bits read per number of a stored token, keys and values alike. What "cross" needs is not counted beyond a
        mean value: it says what could be won at most."""
        read = self.codes.read if self.codes else 16.0
        ranked = SUMMARIES[self.rank] * 16 / self.page / 2 if self.rank else 0.0
        if self.rest == "base":
            return BASE.read + 2 * self.share + ranked
        if self.rest in ("mean", "cross"):
            ranked += 16 / self.page / 2
        return read * self.share + ranked


Watch = Callable[[Memory, mx.array, mx.array], None]


def attend(arm: Arm, maps: dict[int, Maps], watch: Watch | None = None):
    """Return the attention of `arm`. maps: by layer. watch: called with the memory, the mass of each token of its
    pages [B, G, R, T, N] and that of all tokens [B, G, R, T, 1], up to one factor."""

    def of(memory: Memory, queries, keys, values, mask, scale: float) -> mx.array:
        return _attend(arm, maps[memory.index], memory, (queries, keys, values), mask, scale, watch)

    return of


def _stored(
    memory: Memory, codes: Codes, maps: Maps, scale: float
) -> tuple[mx.array, mx.array, mx.array | None]:
    """Keys and values of all pages as they are read back, and the keys' steps; kept with the prompt."""
    if codes not in memory.memo:
        exact = memory.pages(0), memory.pages(1)
        keys, steps = coded(exact[0], KEYS, codes, maps)
        values, _ = coded(exact[1], VALUES, codes, maps)
        if codes.exact:
            kept = _worst(memory, exact, (keys, values), codes.exact, scale)
            pairs = zip(exact, (keys, values), strict=True)
            keys, values = (mx.where(kept, x, y) for x, y in pairs)
        mx.eval(keys, values)
        held = [one for one in memory.memo if isinstance(one, Codes)]
        if len(held) >= HELD:
            del memory.memo[held[0]]
        memory.memo[codes] = keys, values, steps
    return memory.memo[codes]


def _worst(memory: Memory, exact, got, count: int, scale: float) -> mx.array:
    """Return [B, G, N, 1]: the `count` tokens of each page of 128 with the largest error, times the attention that the
    last queries of the prompt pay them."""
    keys = exact[0]
    batch, heads, tokens, dims = keys.shape
    queries = memory.queries.astype(mx.float32).reshape(batch, heads, -1, dims) * scale
    paid = mx.softmax(queries @ keys.swapaxes(-1, -2), axis=-1).mean(-2)
    error = sum(
        ((x - y) ** 2).sum(-1) / ((x**2).sum(-1).mean(-1, keepdims=True) + 1e-9)
        for x, y in zip(exact, got, strict=True)
    )
    votes = (error * (paid + 1e-9)).reshape(batch, heads, -1, 128)
    least = mx.sort(votes, axis=-1)[..., -count, None]
    return (votes >= least).reshape(batch, heads, tokens, 1)


def _attend(arm: Arm, maps: Maps, memory: Memory, triple, mask, scale: float, watch) -> mx.array:
    queries, keys, values = triple
    start, stop = memory.span
    batch, heads, count, dims = queries.shape
    groups = keys.shape[1]
    shape = batch, groups, heads // groups, count
    asked = queries.astype(mx.float32).reshape(batch, groups, -1, dims) * scale
    if arm.codes is None:
        read_keys, read_values, steps = memory.pages(0), memory.pages(1), None
    else:
        read_keys, read_values, steps = _stored(memory, arm.codes, maps, scale)

    def product(x: mx.array) -> mx.array:
        return (asked @ x.astype(mx.float32).swapaxes(-1, -2)).reshape(*shape, -1)

    inside = product(read_keys)
    if steps is not None and arm.codes.correct:
        turned = asked @ maps.keys[1].swapaxes(-1, -2)
        noise = ((turned**2) @ (steps**2).swapaxes(-1, -2) / 24).reshape(*shape, -1)
        inside = inside - mx.repeat(mx.minimum(noise, arm.codes.correct), 128, -1)
    parts = [
        (mx.where(mask[:, a:b], product(keys[:, :, a:b]), LESS), None, values[:, :, a:b])
        for a, b in ((0, start), (stop, keys.shape[2]))
    ]
    weights = None
    if arm.rank:
        rough = rough_values = None
        if arm.rest == "base":
            rough_keys, rough_values, _ = _stored(memory, BASE, maps, scale)
            rough = product(rough_keys)
        scores = rough if arm.rank == "base" else inside
        read = taken(arm.rank, arm.share, arm.page, memory, asked, scores, shape)
        if arm.rest == "base":
            parts.append((mx.where(read, LESS, rough), None, rough_values))
        if arm.rest in ("drop", "base"):
            inside = mx.where(read, inside, LESS)
        else:
            inside, weights = _estimated(arm, inside, read, shape)
    return _mixed(shape, [*parts, (inside, weights, read_values)], memory, watch)


def _estimated(arm: Arm, inside: mx.array, read: mx.array, shape) -> tuple[mx.array, mx.array]:
    """Replace scores of pages that are not read by mean + variance / 2, and return weights that stand for how values go
    with keys: the first order of exp(score - mean) for "cross"."""
    pages = inside.reshape(*shape, -1, arm.page)
    middle = pages.mean(-1, keepdims=True)
    mass = mx.broadcast_to(middle + pages.var(-1, keepdims=True) / 2, pages.shape)
    tilt = 1 + (pages - middle) if arm.rest == "cross" else mx.ones_like(pages)
    return (
        mx.where(read, inside, mass.reshape(inside.shape)),
        mx.where(read, 1.0, tilt.reshape(inside.shape)),
    )


def _mixed(shape, parts, memory: Memory, watch) -> mx.array:
    """Softmax over all parts: (scores [B, G, R, T, N], weights or None, values [B, G, N, D])."""
    batch, groups, repeats, count = shape
    most = LESS
    for scores, *_ in parts:
        most = mx.maximum(most, scores.max(-1, keepdims=True))
    mixed = total = 0
    for scores, weights, held in parts:
        share = mx.exp(scores - most)
        share = share if weights is None else share * weights
        total = total + share.sum(-1, keepdims=True)
        flat = share.reshape(batch, groups, repeats * count, -1)
        mixed = mixed + flat @ held.astype(mx.float32)
    if watch is not None:
        watch(memory, share, total)
    out = mixed.reshape(*shape, -1) / total
    return out.reshape(batch, groups * repeats, count, -1)
