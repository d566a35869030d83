"""Intervals of a row's numbers from the texts and documents behind them."""

from __future__ import annotations

from math import exp

from mlxkv.eval import intervals


def divergence(result: dict) -> dict:
    """Return "texts", how many there are, and intervals of a pooled result of `tasks.divergence`: [low,
    high], or None with too few texts."""
    texts = result["texts"]
    ratio = intervals.share([text["ppl_log_ratio"] for text in texts])
    limits_of = {
        "kl": intervals.mean([text["kl"] for text in texts]),
        "prompt_kl": intervals.mean([text["prompt_kl"] for text in texts]),
        "top1": intervals.share([text["top1"] for text in texts]),
    }
    return {
        "texts": len(texts),
        **{f"{key}_interval": interval.as_list() for key, interval in limits_of.items()},
        "ppl_ratio": exp(ratio.value),
        "ppl_ratio_interval": [exp(ratio.low), exp(ratio.high)] if ratio.known else None,
    }


def retrieval(results: dict[str, dict], base: dict[str, dict]) -> dict:
    """Return intervals of the shares of right values, and of what is lost of full precision's, by kind.
    results, base: pooled results of `tasks.retrieval` by kind."""
    shares = {kind: intervals.found(result["documents"]) for kind, result in results.items()}
    lost = {
        kind: intervals.lost(result["documents"], base[kind]["documents"])
        for kind, result in results.items()
    }
    return {
        "retrieval_interval": {kind: share.as_list() for kind, share in shares.items()},
        "retrieval_lost": {kind: [gap.value, gap.low, gap.high] for kind, gap in lost.items()},
        "documents": len(next(iter(results.values()))["documents"]),
    }


def limits(ends: list[float] | None, form: str = ".2g", scale: float = 1.0) -> str:
    """Format an interval for a table: ' [1, 2]', or nothing if it is not known."""
    return "" if ends is None else f" [{', '.join(format(scale * x, form) for x in ends)}]"
