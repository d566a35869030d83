"""Give blocks of directions their bits, and make the maps that go with them. NumPy float64.

Spec: `mlxkv.spec.mixed_bits`. A calibration file stores none of this: it follows from the moments in it. Letters: `G`
kv heads, `D` head dim, `R` stored dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import numpy as np

from mlxkv.errors import UserError
from mlxkv.formats import matrices
from mlxkv.formats.quantizers import DIMS, ERRORS, GAINS, STEPS, WIDTHS, MixedBits

Widths = tuple[int, ...]
Choice = tuple[float, Widths]  # what widths cost
WORD, SCALE = 32, 16  # bits


def curve(sigma: np.ndarray) -> list[Choice]:
    """Return the widths of least cost, summed over heads, of sigma [G, D] for each possible sum of widths.

    Exact: the cost of a run of blocks depends only on its start, length and width, so the best runs of wider codes are
    extended by the next narrower width.
    """
    blocks = sigma.shape[1] // DIMS
    sums = np.zeros((len(sigma), blocks + 1))
    sums[:, 1:] = np.cumsum(sigma.reshape(len(sigma), blocks, DIMS).sum(-1), -1)
    squares = (sigma**2).sum(0).reshape(blocks, DIMS).sum(-1)
    best: dict[tuple[int, int], Choice] = {(0, 0): (0.0, ())}  # by blocks and sum of widths
    for bits in WIDTHS:
        narrower = dict(best)
        for (start, total), (cost, widths) in narrower.items():
            for count in range(1, blocks - start + 1):
                mass = (sums[:, start + count] - sums[:, start]) ** 2
                total_cost = cost + ERRORS[bits] * float(mass.sum()) / (DIMS * count)
                at = start + count, total + bits * count
                if at not in best or total_cost < best[at][0]:
                    best[at] = total_cost, widths + (bits,) * count
    del best[0, 0]  # a side has one block at least
    out: dict[int, Choice] = {}
    for (stop, total), (cost, widths) in best.items():
        cost += float(squares[stop:].sum())
        if total not in out or cost < out[total][0]:
            out[total] = cost, widths
    return [out[total] for total in sorted(out)]


def weighed(
    side: str, sigma: np.ndarray, exchange: np.ndarray | None = None
) -> tuple[float, np.ndarray]:
    """Return a weight and sigma [G, D]: the weight times the cost of that sigma is what "keys" or "values" add to J.

    exchange: what their noise costs by kv head, measured [G] (`Layer.exchange`). None: the error of a layer's output,
    over the output; nothing where values are all 0, which every code stores.
    """
    squares = (sigma**2).sum(-1)
    if exchange is None:
        size = sigma.size if side == "keys" else float(squares.sum())
        return 1 / size if size else 0.0, sigma
    size = np.full_like(squares, sigma.shape[1]) if side == "keys" else squares
    shares = exchange / np.where(size > 0, size, 1) * (size > 0)
    return 1.0, sigma * np.sqrt(shares)[:, None]


def allot(
    sides: list[tuple[str, np.ndarray]],
    rate: float,
    exchange: Sequence[np.ndarray | None] | None = None,
) -> list[Widths]:
    """Return the widths of least total cost for `sides`, "keys" or "values" with sigma [G, D].

    All kv heads share `rate` bits per value. Exact, as in `curve`: words are allotted side by side.

    exchange: per side, as in `weighed`. Raises UserError if the rate is below one bit for the first block of each.
    """
    heads = [len(sigma) for _, sigma in sides]
    common = gcd(*heads)
    heads = [n // common for n in heads]  # words are then as few as can be
    values = sum(n * sigma.shape[1] for n, (_, sigma) in zip(heads, sides, strict=True))
    budget = int((rate * values - SCALE * sum(heads) + 1e-9) // WORD)
    best = np.zeros(max(budget, 0) + 1)  # least cost by words at most
    choices: list[np.ndarray] = []
    curves: list[list[tuple[float, int, Widths]]] = []
    for n, (name, sigma), costs in zip(heads, sides, exchange or [None] * len(sides), strict=True):
        weight, weighed_sigma = weighed(name, sigma, costs)
        curves.append(
            [(weight * x, n * MixedBits(1.0, w).words, w) for x, w in curve(weighed_sigma)]
        )
    for options in curves:
        least_costs, choice = np.full_like(best, np.inf), np.zeros(len(best), int)
        for i, (cost, words, _) in enumerate(options):
            if words <= budget:
                costs = np.full_like(best, np.inf)
                costs[words:] = best[: len(best) - words] + cost
                better = costs < least_costs
                least_costs[better], choice[better] = costs[better], i
        best = least_costs
        choices.append(choice)
    if budget < 0 or not np.isfinite(best[-1]):
        dims = ", ".join(map(str, sorted({sigma.shape[1] for _, sigma in sides})))
        raise UserError(
            f"[--kv] fill-{rate:g} leaves no bits for codes of heads of {dims} dims; choose more, such as fill-2.25"
        )
    at = int(np.flatnonzero(best <= best[-1])[0])
    out: list[Widths] = []
    for options, choice in zip(curves[::-1], choices[::-1], strict=True):
        _, words, widths = options[int(choice[at])]
        at -= words
        out.append(widths)
    return out[::-1]


def pair(map_down: np.ndarray, sigma: np.ndarray, widths: Widths) -> tuple[np.ndarray, np.ndarray]:
    """Return (down [G, D, R], up [G, R, D]) of a balanced map `map_down` [G, D, D] with sigma [G, D]: runs of one
    width mixed, and scaled so that the levels of a usual token are 1 apart in every width."""
    map_down, back = map_down.astype(np.float64), np.linalg.inv(map_down.astype(np.float64))
    down: list[np.ndarray] = []
    up: list[np.ndarray] = []
    start = 0
    for bits, count in MixedBits(1.0, widths).runs:
        part, mix = slice(start, start + count), matrices.ordered(count)
        size = (
            GAINS[bits]
            * STEPS[bits]
            * np.sqrt(sigma[:, part].astype(np.float64).mean(-1))[:, None, None]
        )
        down.append(map_down[..., part] @ mix / size)
        up.append(mix.T @ back[:, part] * size)
        start += count
    return np.concatenate(down, -1), np.concatenate(up, -2)
