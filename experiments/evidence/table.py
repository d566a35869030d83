"""Format numbers, intervals and lines of Markdown tables."""

from __future__ import annotations

from math import floor, log10

from mlxkv.eval.intervals import Interval


def number(found: Interval | float) -> str:
    """Format with three digits."""
    value = found.value if isinstance(found, Interval) else found
    return f"{value:.3g}".replace("e-0", "e-")


def ratio(found: Interval) -> str:
    text = f"{found.value:.2f}" if found.value < 100 else f"{found.value:.3g}"
    if not found.known:
        return text
    limits = (f"{x:.2f}" if x < 100 else f"{x:.3g}" for x in (found.low, found.high))
    return f"{text} [{', '.join(limits)}]"


def divergence(found: Interval | float) -> str:
    """Format KL (nats) with two digits, in full, with its limits."""
    if isinstance(found, Interval):
        text = divergence(found.value)
        known = found.known and found.value > 0
        return f"{text} [{divergence(found.low)}, {divergence(found.high)}]" if known else text
    if found < 1e-6:
        return "0"
    return f"{found:.{min(6, max(2, 1 - floor(log10(found))))}f}"


def signed(found: Interval) -> str:
    """Format a difference with three places, with its limits."""
    text = f"{found.value:+.3f}"
    return f"{text} [{found.low:+.3f}, {found.high:+.3f}]" if found.known else text


def line(cells) -> str:
    return "| " + " | ".join(cells) + " |"
