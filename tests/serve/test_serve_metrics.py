"""Counts and times in the text that Prometheus reads."""

from __future__ import annotations

from collections import Counter

from mlxkv.serve.metrics import Metrics, text


def test_buckets_count_what_took_no_longer():
    metrics = Metrics()
    for name, seconds in (("first_token", 0.05), ("duration", 0.2), ("duration", 7.0)):
        metrics.took(name, seconds)
    page = text(Counter(), {}, {'a "b"': (metrics, {})})
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if line[0] != "#")
    model = 'model="a \\"b\\""'

    def bucket(name: str, bound: str) -> int:
        return int(lines[f'mlxkv_{name}_seconds_bucket{{{model},le="{bound}"}}'])

    bounds = ("0.05", "0.1", "0.25", "5", "10", "+Inf")
    assert [bucket("duration", bound) for bound in bounds] == [0, 0, 1, 1, 2, 2]
    assert [bucket("first_token", bound) for bound in bounds] == [1] * 6
    assert float(lines[f"mlxkv_duration_seconds_sum{{{model}}}"]) == 7.2
    assert lines[f"mlxkv_first_token_seconds_count{{{model}}}"] == "1"
