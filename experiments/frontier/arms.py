"""Arms: what a decode step reads of the pages of a prompt, and how attention goes on with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx

from experiments.frontier.coding import Codes
from experiments.frontier.engine import Memory
from experiments.frontier.filled import Filled
from experiments.frontier.home import AnyCodes, Home
from experiments.frontier.ranking import SUMMARIES, estimates, pages_read, taken

HELD = 6  # codes whose pages stay with a prompt
LESS = float("-inf")


@dataclass(frozen=True)
class Arm:
    """codes: of all pages, or None for exact ones. rank: one of SUMMARIES, "" to read all pages. share: of the
    pages that are read. page: tokens of one. rest: what stands for the others: "drop", "mean" (their mean value
    with the mass that the ranking gives them), "cross" (how values go with keys, too, with the mass of the exact
    variance of scores: what could be won at most), or "base" (the base of nested codes). against: the arms of
    equal bits that it has to beat. ask: whether questions are asked of it, too."""

    name: str
    codes: AnyCodes | None = None
    rank: str = ""
    share: float = 1.0
    page: int = 64
    rest: str = "drop"
    against: tuple[str, ...] = ()
    ask: bool = False

    def bits(self, home: Home, tokens: int) -> float:
        """Return bits read per number of a stored token, keys and values alike, of `tokens` in pages. What "cross"
        needs is not counted beyond a mean value."""
        read = home.bits(self.codes)
        if not self.rank:
            return read
        share = pages_read(self.share, tokens // self.page) / (tokens // self.page)
        ranked = SUMMARIES[self.rank] * 16 / self.page / 2
        if self.rest == "base":
            least = home.bits(replace(self.codes, base=True))
            return least + share * (read - least) + ranked
        if self.boxed:
            return read * share + ranked * (1 - share)
        if self.rank == "both":
            return read * share + ranked * (2 - share)
        if self.rest in ("mean", "cross"):
            ranked += 16 / self.page / 2 * (1 - share)
        return read * share + ranked

    @property
    def boxed(self) -> bool:
        """Whether the scales and biases of codes are the boxes that pages are ranked by."""
        plain = isinstance(self.codes, Codes) and self.codes.plain
        return plain and self.rank.startswith("boxes") and self.page == 64


Watch = Callable[[Memory, mx.array, mx.array], None]


def attend(arm: Arm, home: Home, watch: Watch | None = None):
    """Return the attention of `arm`. watch: called with the memory, the mass of each token of its
    pages [B, G, R, T, N] and that of all tokens [B, G, R, T, 1], up to one factor."""

    def of(memory: Memory, queries, keys, values, mask, scale: float) -> mx.array:
        return _attend(arm, home, memory, (queries, keys, values), mask, scale, watch)

    return of


def _stored(
    memory: Memory, codes: AnyCodes, home: Home, scale: float
) -> tuple[mx.array, mx.array, mx.array | None]:
    """Keys and values of all pages as they are read back, and the keys' steps or scales; kept with the prompt."""
    codes = codes.kept if isinstance(codes, Codes | Filled) else codes
    if codes not in memory.memo:
        exact = memory.pages(0), memory.pages(1)
        keys, values, steps = home.coder(codes, memory.index).coded(*exact)
        if getattr(codes, "exact", 0):
            kept = _worst(memory, exact, (keys, values), codes.exact, scale)
            pairs = zip(exact, (keys, values), strict=True)
            keys, values = (mx.where(kept, x, y) for x, y in pairs)
        mx.eval(keys, values)
        held = [one for one in memory.memo if isinstance(one, AnyCodes)]
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


def _attend(arm: Arm, home: Home, memory: Memory, triple, mask, scale: float, watch) -> mx.array:
    queries, keys, values = triple
    start, stop = memory.span
    batch, heads, count, dims = queries.shape
    groups = keys.shape[1]
    shape = batch, groups, heads // groups, count
    asked = queries.astype(mx.float32).reshape(batch, groups, -1, dims) * scale
    if arm.codes is None:
        read_keys, read_values, steps = memory.pages(0), memory.pages(1), None
    else:
        read_keys, read_values, steps = _stored(memory, arm.codes, home, scale)

    def product(x: mx.array) -> mx.array:
        return (asked @ x.astype(mx.float32).swapaxes(-1, -2)).reshape(*shape, -1)

    inside = _shifted(product(read_keys), arm.codes, asked, steps, memory, home)
    parts = [
        (mx.where(mask[:, a:b], product(keys[:, :, a:b]), LESS), None, values[:, :, a:b])
        for a, b in ((0, start), (stop, keys.shape[2]))
    ]
    weights = None
    if arm.rank == "turned":
        memory.memo["maps"] = home.layers[memory.index].keys
    if arm.rank:
        rough = rough_values = None
        if arm.rest == "base":
            base = replace(arm.codes, base=True)
            rough_keys, rough_values, _ = _stored(memory, base, home, scale)
            rough = product(rough_keys)
        scores = rough if arm.rank == "base" else inside
        if arm.rank == "oracle" and arm.codes is not None:
            scores = product(memory.pages(0))
        beside = mx.logsumexp(mx.concatenate([x for x, *_ in parts], -1), axis=-1, keepdims=True)
        read = taken(arm.rank, arm.share, arm.page, memory, asked, scores, beside, shape)
        if arm.rest == "base":
            parts.append((mx.where(read, LESS, rough), None, rough_values))
        if arm.rest in ("drop", "base"):
            inside = mx.where(read, inside, LESS)
        else:
            held = estimates(arm.rank, arm.page, memory, asked, inside, shape)
            inside, weights = _estimated(arm, inside, held, read, shape)
    return _mixed(shape, [*parts, (inside, weights, read_values)], memory, watch)


def _shifted(inside, codes, asked, steps, memory: Memory, home: Home) -> mx.array:
    """Correct scores [B, G, R, T, N] for the noise of codes."""
    if isinstance(codes, Codes) and codes.correct and steps is not None:
        up = home.layers[memory.index].keys[1]
        turned = asked @ up.swapaxes(-1, -2)
        noise = ((turned**2) @ (steps**2).swapaxes(-1, -2) / 24).reshape(*inside.shape[:-1], -1)
        return inside - mx.repeat(mx.minimum(noise, codes.correct), 128, -1)
    if isinstance(codes, Filled) and (codes.correct or codes.lost):
        keys = home.coder(codes, memory.index).sides[0]
        flat = inside.reshape(*asked.shape[:3], -1)
        return (flat + keys.shift(asked, steps, codes)).reshape(inside.shape)
    return inside


def _estimated(arm: Arm, inside: mx.array, held: mx.array, read: mx.array, shape):
    """Give pages that are not read the mass that a ranking says, spread evenly over their tokens; for "cross" that of
    the exact mean and variance of scores, tilted by the first order of exp(score - mean)."""
    pages = inside.reshape(*shape, -1, arm.page)
    tilt = mx.ones_like(pages)
    if arm.rest == "cross":
        middle = pages.mean(-1, keepdims=True)
        held = (middle + pages.var(-1, keepdims=True) / 2)[..., 0]
        tilt = 1 + (pages - middle)
    mass = mx.broadcast_to(held[..., None], pages.shape)
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
