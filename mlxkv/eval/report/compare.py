"""Intervals of a row's numbers from the texts and documents behind them, and presets compared in pairs."""

from __future__ import annotations

from math import exp

from mlxkv.eval import intervals
from mlxkv.eval.arms import BASELINE
from mlxkv.eval.intervals import Interval


def divergence(result: dict) -> dict:
    """Return "texts", how many there are, and intervals of a pooled result of `tasks.divergence`: [low,
    high], or None with too few texts."""
    texts = result["texts"]
    ratio = intervals.share([one["ppl_log_ratio"] for one in texts])
    found = {
        "kl": intervals.mean([one["kl"] for one in texts]),
        "prompt_kl": intervals.mean([one["prompt_kl"] for one in texts]),
        "top1": intervals.share([one["top1"] for one in texts]),
    }
    return {
        "texts": len(texts),
        **{f"{key}_interval": one.as_list() for key, one in found.items()},
        "ppl_ratio": exp(ratio.value),
        "ppl_ratio_interval": [exp(ratio.low), exp(ratio.high)] if ratio.known else None,
    }


def retrieval(results: dict[str, dict], base: dict[str, dict]) -> dict:
    """Return intervals of the shares of right values, and of what is lost of full precision's, by kind.
    results, base: pooled results of `tasks.retrieval` by kind."""
    shares = {kind: intervals.found(one["documents"]) for kind, one in results.items()}
    lost = {
        kind: intervals.lost(one["documents"], base[kind]["documents"])
        for kind, one in results.items()
    }
    return {
        "retrieval_interval": {kind: one.as_list() for kind, one in shares.items()},
        "retrieval_lost": {kind: [one.value, one.low, one.high] for kind, one in lost.items()},
        "documents": len(next(iter(results.values()))["documents"]),
    }


def pairs(part: dict[str, dict]) -> list[dict]:
    """Return each pair of presets with the ratio and the difference of their mean KL on the same texts.
    part: pooled results of divergence at one context, by arm."""
    texts = _by_name(part)
    names = list(texts)
    out = []
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            ratio = intervals.ratio(texts[one], texts[other])
            gap = intervals.difference(texts[one], texts[other])
            out.append(
                {
                    "of": one,
                    "to": other,
                    "kl_ratio": ratio.value,
                    "kl_ratio_interval": ratio.as_list(),
                    "kl_difference": gap.value,
                    "kl_difference_interval": gap.as_list(),
                    "told_apart": ratio.known and not ratio.holds(1.0),
                }
            )
    return out


def letters(part: dict[str, dict]) -> dict[str, str]:
    """Return letters for the presets, least KL first: those that share one are not told apart."""
    texts = _by_name(part)
    order = sorted(texts, key=lambda name: sum(texts[name]))
    return intervals.letters(order, intervals.apart(texts))


def _by_name(part: dict[str, dict]) -> dict[str, list[float]]:
    return {
        name: [text["kl"] for text in one["texts"]]
        for name, one in part.items()
        if name != BASELINE
    }


def limits(found: list[float] | None, form: str = ".2g", scale: float = 1.0) -> str:
    """Format an interval for a table: ' [1, 2]', or nothing if it is not known."""
    return "" if found is None else f" [{', '.join(format(scale * x, form) for x in found)}]"


def known(row: dict, key: str, value: float) -> Interval:
    """Return a number of a row with its interval."""
    return Interval(value, *(row.get(f"{key}_interval") or (None, None)))
