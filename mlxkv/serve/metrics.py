"""Counts and times since the start of the server, in Prometheus' text format."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from math import inf

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # seconds
COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Tokens of prompts that a cache held already.",
    "generated_tokens": "Tokens of replies.",
    "cut_off": "Replies whose reader left.",
    "faults": "Failures of the generation thread.",
}
TIMES = {
    "first_token": "Seconds to the first token.",
    "duration": "Seconds to the end of a reply.",
}


class Metrics:
    """Counts of one model by the names of `COUNTERS`, which keep going while it is unloaded. Its generation thread
    counts faults, the event loop all others."""

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
    """The page of `/metrics`. responses: by status. gauges: of the server. models: their counts, and for those that are
    loaded their documents of /v1/kv; else an empty one."""
    lines: list[str] = []

    def family(name: str, kind: str, text: str, samples: Iterable[tuple[str, dict, float]]) -> None:
        full = f"mlxkv_{name}"
        lines.extend((f"# HELP {full} {text}", f"# TYPE {full} {kind}"))
        for suffix, labels, value in samples:
            shown = ",".join(f"{label}={json.dumps(str(x))}" for label, x in labels.items())
            lines.append(f"{full}{suffix}{f'{{{shown}}}' if shown else ''} {value:.10g}")

    statuses = [("", {"status": status}, n) for status, n in sorted(responses.items())]
    family("responses_total", "counter", "HTTP responses.", statuses)
    for name, value in gauges.items():
        family(name, "gauge", "Of the whole server.", [("", {}, value)])
    for name, words in COUNTERS.items():
        rows = [("", {"model": model}, found.counts[name]) for model, (found, _) in models.items()]
        family(f"{name}_total", "counter", words, rows)
    for name, words in TIMES.items():
        rows = []
        for model, (found, _) in models.items():
            *counts, total, seconds = found.times[name]
            for bound, count in zip((*BUCKETS, "+Inf"), (*counts, total), strict=True):
                rows.append(("_bucket", {"model": model, "le": bound}, count))
            rows += [("_sum", {"model": model}, seconds), ("_count", {"model": model}, total)]
        family(f"{name}_seconds", "histogram", words, rows)
    values: dict[tuple[str, str], list] = {}
    for model, (_, document) in models.items():
        for name, words, value in _gauges(document):
            values.setdefault((name, words), []).append(("", {"model": model}, value))
    for (name, words), rows in values.items():
        family(name, "gauge", words, rows)
    return "\n".join(lines) + "\n"


def _gauges(document: dict) -> Iterable[tuple[str, str, float]]:
    """Yield the numbers of a document of /v1/kv: name, help, value."""
    if document:
        yield "safe_tokens", "Of a request that is admitted now.", document["safe_tokens"]
    for name, words in (
        ("kv", "Of KV caches."),
        ("sessions", "Of the prompt cache."),
        ("disk", "Of sessions on disk."),
    ):
        for field, value in (document.get("memory" if name == "kv" else name) or {}).items():
            yield f"{name}_{field}", words, value
