"""`mlxkv bench batch`: rows, ratios, what fits, refusals."""

from __future__ import annotations

import pytest
from bench_workers import fails, said
from on_emulator import make

from mlxkv.bench.whole import batched
from mlxkv.cache import selftest
from mlxkv.metal import launch

KEYS = {
    *("model", "dtype", "context", "preset", "by", "batch", "together", "tokens_per_second"),
    *("spread", "step_ms", "kv_bytes", "sequence_bytes", "peak_bytes", "baseline_ratio"),
}


def test_rows_come_as_they_are_done(capsys, bare_folder):
    options = ("--kv", "int4,fp16", "--batches", "1,3", "--context", 300, "--tokens", 2)
    options += ("--rounds", 1, "--memory", "1GB", "--json")
    out, data = said(capsys, "bench", "batch", "--model", bare_folder, *options)
    rows = data["rows"]
    assert all(set(row) == KEYS for row in rows)
    assert [(r["preset"], r["batch"]) for r in rows] == [
        *(("fp16", 1), ("fp16", 3), ("int4", 1), ("int4", 3))  # full precision first: the ratios
    ]
    assert [r["together"] for r in rows] == [None, None, None, False]  # no kernels on a CPU
    plain = {r["batch"]: r["tokens_per_second"] for r in rows[:2]}
    for row in rows:
        assert row["baseline_ratio"] == row["tokens_per_second"] / plain[row["batch"]]
        assert row["sequence_bytes"] == row["kv_bytes"] // row["batch"]
    assert rows[2]["sequence_bytes"] < rows[0]["sequence_bytes"] / 2
    left = (1 << 30) - data["weight_bytes"]
    assert data["fits_by_arithmetic"] == {
        r["preset"]: left // r["sequence_bytes"] for r in rows if r["batch"] == 3
    }
    assert "by arithmetic alone" in out and "beside the weights in 1.00 GiB" in out


def test_with_kernels_the_batch_is_together(capsys, bare_folder, monkeypatch):
    monkeypatch.setattr(selftest, "fault", lambda *_, **__: None)
    monkeypatch.setattr(batched, "WARM", 1)
    options = ("--kv", "srft-int4", "--batches", "2", "--context", 200, "--tokens", 1)
    with launch.using(make):
        _, data = said(
            capsys, "bench", "batch", "--model", bare_folder, *options, "--rounds", 1, "--json"
        )
    (row,) = data["rows"]
    assert row["together"] is True and row["by"] == "kernels" and row["baseline_ratio"] is None
    assert data["fits_by_arithmetic"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--batches", "4,none"), "[--batches]"),
        (("--batches", "0"), "[--batches]"),
        (("--context", "none"), "[--context]"),
        (("--memory", "none"), "[--memory]"),
        (("--tokens", "0"), "[--tokens]"),
        (("--dtype", "int8"), "[--dtype]"),
        (("--kv", "fp16,oja-0.75"), "observes queries"),
    ],
)
def test_it_refuses(capsys, options, words):
    assert words in fails(capsys, "bench", "batch", *options)
