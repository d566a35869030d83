"""Counts and times since the start of the server, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from threading import Lock

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # seconds


class Histogram:
    """Counts observations at or below each of `BUCKETS`."""

    def __init__(self):
        self.counts = [0] * len(BUCKETS)
        self.total, self.sum = 0, 0.0

    def add(self, seconds: float) -> None:
        self.total += 1
        self.sum += seconds
        for i, bound in enumerate(BUCKETS):
            self.counts[i] += seconds <= bound


class Metrics:
    """Counters and histograms. All methods are safe from any thread."""

    def __init__(self):
        self._lock = Lock()
        self.responses: Counter[int] = Counter()  # by status
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.active = self.cut_off = self.faults = 0
        self.first_token, self.duration = Histogram(), Histogram()

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
            if first is not None:
                self.first_token.add(first)
            self.duration.add(whole)

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
                found: Histogram = getattr(self, name)
                pairs = zip(BUCKETS, found.counts, strict=True)
                rows = [(f'_bucket{{le="{bound:g}"}}', count) for bound, count in pairs]
                rows += [('_bucket{le="+Inf"}', found.total)]
                rows += [("_sum", found.sum), ("_count", found.total)]
                family(f"{name}_seconds", "histogram", text, rows)
        for name, text, value in gauges:
            family(name, "gauge", text, [("", value)])
        return "\n".join(lines) + "\n"
