"""Rank pages by what a summary of their keys says of the attention that a query pays them."""

from __future__ import annotations

from math import floor, log

import mlx.core as mx

from experiments.frontier.engine import Memory

# What a ranking reads of every page, in vectors of a key's length in 16 bits. "full" (the exact variance of scores)
# and "oracle" (their exact mass) say what could be won at most, and are counted as if they were free; "base" reads
# codes that are read anyway.
# "boxes": Quest's score, by head made a share of the mass as the others are; "boxes sum": added up over the heads that
# share keys, as they are.
SUMMARIES = {"mean": 1, "diagonal": 2, "low rank": 4, "boxes": 2, "boxes sum": 2, "full": 0}
SUMMARIES |= {"oracle": 0, "base": 0}
# The mean and the variance behind the balanced map of keys, whose channels depend on each other the least.
SUMMARIES |= {"turned": 2}
# "both": the sum of what the diagonal and boxes say, boxes free as codes' steps are. "most": the largest share that a
# head that shares the keys gives a page, in place of their sum. "quarter": mean + variance / 4.
SUMMARIES |= {"both": 2, "most": 2, "quarter": 2}
# The diagonal in 8 bits, each vector with a scale.
SUMMARIES |= {"diagonal8": 1}
# Of "low rank": directions kept for a page, and steps of the power method for each.
DIRECTIONS, ITERATIONS = 2, 6


def pages_read(share: float, pages: int) -> int:
    """Return how many of `pages` are read: at least one."""
    return max(1, floor(share * pages + 0.5))


def taken(
    rank: str, share: float, page: int, memory: Memory, asked, scores, beside, shape
) -> mx.array:
    """Return which tokens of pages are read, [B, G, 1, T, N]: heads that share keys read the same pages, those with
    the largest sum of estimated shares of all the mass. asked, scores, shape: as in `estimates`. beside: the logarithm
    of the mass of the exact windows, [B, G, R, T, 1], which is read anyway: a head that looks there needs no page."""
    if rank == "both":
        found = [
            shares(one, page, memory, asked, scores, beside, shape) for one in ("diagonal", "boxes")
        ]
        whole = found[0] + found[1]
    else:
        whole = shares(rank, page, memory, asked, scores, beside, shape)
    order = mx.argsort(mx.argsort(-whole, axis=-1), axis=-1)
    return mx.repeat(order < pages_read(share, whole.shape[-1]), page, axis=-1)


def shares(rank: str, page: int, memory: Memory, asked, scores, beside, shape) -> mx.array:
    """Return what pages are ranked by, [B, G, 1, T, pages]."""
    held = estimates(rank, page, memory, asked, scores, shape)
    if rank == "boxes sum":
        whole = held.sum(2, keepdims=True)
    elif rank == "boxes":  # a bound of single scores says nothing of the mass beside the windows
        whole = mx.softmax(held, axis=-1).sum(2, keepdims=True)
    else:
        both = mx.concatenate([held + log(page), beside], axis=-1)
        mass = mx.softmax(both, axis=-1)[..., :-1]
        whole = (mass.max if rank == "most" else mass.sum)(2, keepdims=True)
    return whole


def estimates(rank: str, page: int, memory: Memory, asked, scores, shape) -> mx.array:
    """Return the logarithm of each page's attention mass over its tokens, [B, G, R, T, pages], as `rank` sees it.

    asked: queries times their scale [B, G, R * T, D]. scores: of what is read, [B, G, R, T, N]. shape: B, G, R, T.
    """
    if rank in ("oracle", "base"):
        return mx.logsumexp(scores.reshape(*shape, -1, page), axis=-1) - log(page)
    if rank == "full":
        parts = scores.reshape(*shape, -1, page)
        return parts.mean(-1) + parts.var(-1) / 2

    def product(x: mx.array, y: mx.array) -> mx.array:
        return (x @ y.swapaxes(-1, -2)).reshape(*shape, -1)

    keys = memory.pages(0)
    if rank == "turned":
        down, up = memory.memo["maps"]
        keys, asked = keys @ down, asked @ up.swapaxes(-1, -2)
    name = {"boxes sum": "boxes", "most": "diagonal", "quarter": "diagonal"}.get(rank, rank)
    kept = "summary", name, page
    if kept not in memory.memo:
        memory.memo[kept] = _summary(kept[1], keys, page)
        mx.eval(memory.memo[kept])
    one, two, *more = memory.memo[kept]
    if rank.startswith("boxes"):  # Quest (Tang et al. 2024), section 3.2
        return product(mx.maximum(asked, 0), one) + product(mx.minimum(asked, 0), two)
    found = product(asked, one)
    if rank == "mean":
        return found
    found = found + product(asked**2, two) / (4 if rank == "quarter" else 2)
    return found + sum(product(asked, direction) ** 2 for direction in more) / 2


def _in_8_bits(x: mx.array) -> mx.array:
    step = mx.maximum(mx.abs(x).max(-1, keepdims=True) / 127, 1e-12)
    return mx.round(x / step) * step


def _summary(rank: str, keys: mx.array, page: int) -> list[mx.array]:
    """Summarise pages of keys [B, G, N, D]: arrays [B, G, pages, D]. Boxes: most and least. Otherwise mean, variance,
    and for "low rank" directions, scaled by the spread along them, that the variance no longer holds."""
    pages = keys.reshape(*keys.shape[:2], -1, page, keys.shape[-1])
    if rank == "boxes":
        return [pages.max(-2), pages.min(-2)]
    mean = pages.mean(-2)
    if rank == "diagonal8":
        return [_in_8_bits(mean), _in_8_bits(pages.var(-2) ** 0.5) ** 2]
    if rank != "low rank":
        return [mean, pages.var(-2)]
    apart, found = pages - mean[..., None, :], []
    for _ in range(DIRECTIONS):
        # The token furthest away is not orthogonal to the direction that is looked for.
        far = mx.argmax((apart**2).sum(-1), axis=-1)[..., None, None]
        unit = mx.take_along_axis(apart, far, axis=-2)
        for _ in range(ITERATIONS):
            unit = unit / mx.maximum(mx.linalg.norm(unit, axis=-1, keepdims=True), 1e-12)
            unit = (apart @ unit.swapaxes(-1, -2)).swapaxes(-1, -2) @ apart
        unit = unit / mx.maximum(mx.linalg.norm(unit, axis=-1, keepdims=True), 1e-12)
        along = apart @ unit.swapaxes(-1, -2)
        found.append((unit * mx.sqrt((along**2).mean(-2, keepdims=True)))[..., 0, :])
        apart = apart - along * unit
    return [mean, (apart**2).mean(-2), *found]
