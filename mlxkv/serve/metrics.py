"""Counts and times since the start of the server, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf
from threading import Lock

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # seconds


class Metrics:
    """Counters and histograms. All methods are safe from any thread."""

    def __init__(self):
        self._lock = Lock()
        self.responses: Counter[int] = Counter()  # by status
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.active = self.cut_off = self.faults = 0
        # Observations at or below each of `BUCKETS`, all of them, and their sum.
        self.first_token, self.duration = ([0.0] * (len(BUCKETS) + 2) for _ in range(2))

    def add(self, **counts: int) -> None:
        """Add to counters by name."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def answered(self, status: int) -> None:
        with self._lock:
            self.responses[status] += 1

    def took(self, first: float | None, whole: float) -> None:
        """Note the seconds to the first token, if there was one, and to the last."""
        with self._lock:
            for counts, seconds in ((self.first_token, first), (self.duration, whole)):
                if seconds is not None:
                    for i, bound in enumerate((*BUCKETS, inf)):
                        counts[i] += seconds <= bound
                    counts[-1] += seconds

    def text(self, gauges: Iterable[tuple[str, str, float]]) -> str:
        """The page of `/metrics`. gauges: (name, help, value) of numbers that are kept elsewhere."""
        lines: list[str] = []

        def family(name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]) -> None:
            full = f"mlxkv_{name}"
            lines.extend((f"# HELP {full} {text}", f"# TYPE {full} {kind}"))
            lines.extend(f"{full}{suffix} {value:.10g}" for suffix, value in samples)

        with self._lock:
            by_status = [(f'{{status="{s}"}}', n) for s, n in sorted(self.responses.items())]
            family("responses_total", "counter", "HTTP responses.", by_status)
            for name, text in (
                ("prompt_tokens", "Tokens of prompts."),
                ("cached_tokens", "Tokens of prompts that a cache held already."),
                ("generated_tokens", "Tokens of replies."),
                ("cut_off", "Replies whose reader left."),
                ("faults", "Failures of the generation thread."),
            ):
                family(f"{name}_total", "counter", text, [("", getattr(self, name))])
            family("active_requests", "gauge", "Requests under way.", [("", self.active)])
            for name, text in (
                ("first_token", "Seconds to the first token."),
                ("duration", "Seconds to the end of a reply."),
            ):
                *counts, total, seconds = getattr(self, name)
                pairs = zip((*BUCKETS, "+Inf"), (*counts, total), strict=True)
                rows = [(f'_bucket{{le="{bound}"}}', count) for bound, count in pairs]
                rows += [("_sum", seconds), ("_count", total)]
                family(f"{name}_seconds", "histogram", text, rows)
        for name, text, value in gauges:
            family(name, "gauge", text, [("", value)])
        return "\n".join(lines) + "\n"
