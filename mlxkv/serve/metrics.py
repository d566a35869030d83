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
# The parts of a document of /v1/kv whose numbers are shown.
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
    """Counts of one model by the names of `COUNTERS`. Its generation thread counts faults, the event loop all
    others."""

    def __init__(self):
        self.counts: Counter[str] = Counter()
        # Observations at or below each of `BUCKETS`, all of them, and their sum.
        self.times = {name: [0.0] * (len(BUCKETS) + 2) for name in TIMES}

    def took(self, name: str, seconds: float) -> None:
        """Note one of `TIMES`."""
        counts = self.times[name]
        for i, bound in enumerate((*BUCKETS, inf)):
            counts[i] += seconds <= bound
        counts[-1] += seconds


def text(
    responses: Counter[int], gauges: dict[str, float], models: dict[str, tuple[Metrics, dict]]
) -> str:
    """Return the page of `/metrics`. responses: by status. gauges: of the server. models: counts of those that are
    loaded, and their documents of /v1/kv."""
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
    """Return the value of a label. Prometheus knows no other escapes, and drops a page that has some."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
