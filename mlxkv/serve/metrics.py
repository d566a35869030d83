"""Counts and times since the start of the server, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from math import inf

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # seconds
COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Tokens of prompts that a cache held already.",
    "generated_tokens": "Tokens of replies.",
    "cut_off": "Replies whose reader left.",
    "faults": "Failures of the generation thread.",
}
# Parts of the /v1/kv document exported as gauges.
GAUGES = {
    "memory": ("kv", "Of KV caches."),
    "sessions": ("sessions", "Of the prompt cache."),
    "disk": ("disk", "Of sessions on disk."),
}
TIMES = {
    "first_token": "Seconds to the first token.",
    "duration": "Seconds to the end of a reply.",
}


class Metrics:
    """Counters of one model, named as in `COUNTERS`. The generation thread counts faults, the event loop all other
    ones."""

    def __init__(self):
        self.counts: Counter[str] = Counter()
        # Counts of observations at or below each of `BUCKETS`, the total count, and the sum.
        self.times = {name: [0.0] * (len(BUCKETS) + 2) for name in TIMES}

    def took(self, name: str, seconds: float) -> None:
        """Record an observation of one of `TIMES`."""
        counts = self.times[name]
        for i, bound in enumerate((*BUCKETS, inf)):
            counts[i] += seconds <= bound
        counts[-1] += seconds


def text(
    responses: Counter[int], gauges: dict[str, float], models: dict[str, tuple[Metrics, dict]]
) -> str:
    """Return the page of `/metrics`. responses: counts by status. gauges: the server's. models: metrics of the loaded
    models, and their /v1/kv documents."""
    families: dict[str, list[str]] = {}

    def add(name: str, kind: str, words: str, value: float, suffix: str = "", **labels) -> None:
        full = f"mlxkv_{name}"
        lines = families.setdefault(full, [f"# HELP {full} {words}", f"# TYPE {full} {kind}"])
        shown = ",".join(f'{label}="{_escaped(str(x))}"' for label, x in labels.items())
        lines.append(f"{full}{suffix}{f'{{{shown}}}' if shown else ''} {value:.10g}")

    for status, count in sorted(responses.items()):
        add("responses_total", "counter", "HTTP responses.", count, status=status)
    for name, value in gauges.items():
        add(name, "gauge", "Of the whole server.", value)
    for model, (metrics, document) in models.items():
        for name, words in COUNTERS.items():
            add(f"{name}_total", "counter", words, metrics.counts[name], model=model)
        for name, words in TIMES.items():
            family = f"{name}_seconds", "histogram", words
            *counts, total, seconds = metrics.times[name]
            for bound, count in zip((*BUCKETS, "+Inf"), (*counts, total), strict=True):
                add(*family, count, "_bucket", model=model, le=bound)
            add(*family, seconds, "_sum", model=model)
            add(*family, total, "_count", model=model)
        words = "Of a request that is admitted now."
        add("safe_tokens", "gauge", words, document["safe_tokens"], model=model)
        for part, (prefix, words) in GAUGES.items():
            for name, value in (document[part] or {}).items():
                add(f"{prefix}_{name}", "gauge", words, value, model=model)
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _escaped(text: str) -> str:
    """Escape a label's value. Prometheus accepts no other escapes, and rejects the page otherwise."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
