"""Compare variants in pairs, on the same texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp

from mlxkv.eval import intervals
from mlxkv.eval.rows import Row

Pairs = Sequence[tuple[str, str]]


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; the first line is its head."""
    rule = ["---"] * len(lines[0])
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


def text(x: intervals.Interval) -> str:
    """Return a value and its limits, where it has any, of three digits."""
    limits = f" [{x.limits[0]:.3g}, {x.limits[1]:.3g}]" if x.known else ""
    return f"{x.value:.3g}{limits}"


def more_perplexity(rows: Iterable[Row]) -> float:
    """Return how much a variant adds to perplexity, over the tokens of texts of one length."""
    both = [(row["nll"], row["nll_base"]) for row in rows]
    ours, base = (sum(numbers) / len(both) for numbers in zip(*both, strict=True))
    return exp(min(ours, 700.0)) - exp(base)


def cells(rows: Iterable[Row], task: str, model: str) -> dict[tuple[int, str], dict[str, Row]]:
    """Return the rows of a task by (context, variant) and text, of one model."""
    out: dict[tuple[int, str], dict[str, Row]] = {}
    for row in rows:
        if (row["task"], row["model"]) == (task, model):
            out.setdefault((row["context"], row["preset"]), {})[row["text"]] = row
    return out


def ratios(rows: Iterable[Row], task: str, model: str, pairs: Pairs) -> str:
    """Return a table in Markdown: a line for each context and pair of which both were measured.

    KL: mean KL of the first over mean KL of the second. nats a token: how much more the first adds to the negative
    log likelihood. Both on the texts that both read, with intervals of 95 % over texts.
    """
    found = cells(rows, task, model)
    lines = [["context", "variant / other", "bits", "KL", "nats a token", "more perplexity"]]
    for context in sorted({context for context, _ in found}):
        for pair in pairs:
            ours, theirs = (found.get((context, name), {}) for name in pair)
            texts = [name for name in ours if name in theirs]
            if not texts:
                continue
            sides = [[x[name] for name in texts] for x in (ours, theirs)]
            kl = intervals.ratio(*([row["kl"] for row in side] for side in sides))
            nats = intervals.share([a["nll"] - b["nll"] for a, b in zip(*sides, strict=True)])
            bits = " / ".join(f"{side[0]['bits']:.3g}" for side in sides)
            more = " / ".join(f"{more_perplexity(side):.3g}" for side in sides)
            lines.append([str(context), " / ".join(pair), bits, text(kl), text(nats), more])
    return markdown(lines)
