"""Counts and times in the text that Prometheus reads."""

from __future__ import annotations

from mlxkv.serve.metrics import Metrics


def test_buckets_count_what_took_no_longer():
    metrics = Metrics()
    metrics.took(0.05, 0.2)
    metrics.took(None, 7.0)
    lines = dict(line.rsplit(" ", 1) for line in metrics.text([]).splitlines() if line[0] != "#")

    def bucket(name: str, bound: str) -> int:
        return int(lines[f'mlxkv_{name}_seconds_bucket{{le="{bound}"}}'])

    bounds = ("0.05", "0.1", "0.25", "5", "10", "+Inf")
    assert [bucket("duration", bound) for bound in bounds] == [0, 0, 1, 1, 2, 2]
    assert [bucket("first_token", bound) for bound in bounds] == [1] * 6
    assert float(lines["mlxkv_duration_seconds_sum"]) == 7.2
    assert lines["mlxkv_first_token_seconds_count"] == "1"
