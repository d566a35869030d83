"""Format numbers, intervals and lines of Markdown tables."""

from __future__ import annotations

from math import floor, log10

from mlxkv.eval.intervals import Interval


def divergence(figure: Interval | float) -> str:
    """Format KL (nats) with two digits, in full, with its limits."""
    if isinstance(figure, Interval):
        text = divergence(figure.value)
        has_limits = figure.known and figure.value > 0
        return (
            f"{text} [{divergence(figure.low)}, {divergence(figure.high)}]" if has_limits else text
        )
    if figure < 1e-6:
        return "0"
    return f"{figure:.{min(6, max(2, 1 - floor(log10(figure))))}f}"


def signed(figure: Interval) -> str:
    """Format a difference with three places, with its limits."""
    text = f"{figure.value:+.3f}"
    return f"{text} [{figure.low:+.3f}, {figure.high:+.3f}]" if figure.known else text


def line(cells) -> str:
    return "| " + " | ".join(cells) + " |"
