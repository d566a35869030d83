"""`mlxkv bench batch`: rows, ratios, what fits, refusals."""

from __future__ import annotations

import mlx.core as mx
import pytest
from bench_workers import fails, said
from on_emulator import make

from mlxkv.bench.whole import batched
from mlxkv.cache import selftest
from mlxkv.metal import launch

KEYS = {
    *("model", "dtype", "context", "preset", "by", "batch", "together", "tokens_per_second"),
    *("spread", "step_ms", "kv_bytes", "sequence_bytes", "peak_bytes", "baseline_ratio"),
    *("attention_ms", "no_mask_ratio", "sdpa_ratio"),
}


def test_rows_come_as_they_are_done(capsys, bare_folder):
    options = ("--kv", "int4,fp16", "--batches", "1,3", "--context", 600, "--tokens", 2)
    options += ("--rounds", 1, "--memory", "1GB", "--json")
    out, data = said(capsys, "bench", "batch", "--model", bare_folder, *options)
    rows = data["rows"]
    assert all(set(row) == KEYS for row in rows)
    assert [(r["preset"], r["batch"]) for r in rows] == [
        # full precision first: the ratios
        *(("fp16", 1), ("fp16", 3), ("fp16-no-mask", 1), ("fp16-no-mask", 3)),
        *(("int4", 1), ("int4", 3)),
    ]
    assert [r["together"] for r in rows] == [None] * 5 + [False]  # no kernels on a CPU
    for row in rows:
        masked, bare = ({r["batch"]: r for r in rows[i : i + 2]}[row["batch"]] for i in (0, 2))
        speed = row["tokens_per_second"]
        assert row["baseline_ratio"] == pytest.approx(speed / masked["tokens_per_second"])
        late = row["preset"] != "fp16"  # measured before the other baseline
        wanted = speed / bare["tokens_per_second"] if late else None
        assert row["no_mask_ratio"] == (pytest.approx(wanted) if late else None)
        wanted = bare["attention_ms"] / row["attention_ms"] if late else None
        assert row["sdpa_ratio"] == (pytest.approx(wanted) if late else None)
        assert row["attention_ms"] > 0
    assert "whose mask is an array" in out
    for row in rows:
        assert row["sequence_bytes"] == row["kv_bytes"] // row["batch"]
    assert rows[4]["sequence_bytes"] < rows[0]["sequence_bytes"] / 2
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


def test_it_refuses(subtests, capsys):
    for options, words in [
        (("--batches", "4,none"), "[--batches]"),
        (("--batches", "0"), "[--batches]"),
        (("--context", "none"), "[--context]"),
        (("--memory", "none"), "[--memory]"),
        (("--tokens", "0"), "[--tokens]"),
        (("--dtype", "int8"), "[--dtype]"),
        (("--kv", "fp16,oja-0.75"), "observes queries"),
    ]:
        with subtests.test(options=options, words=words):
            assert words in fails(capsys, "bench", "batch", *options)


def test_side_by_side_needs_no_mask_and_says_the_same(bare_folder):
    """Sequences in mlx-lm's caches of one: no mask, and the logits of mlx-lm's own batches."""
    it = batched.load_subject(str(bare_folder), None, None)
    one = batched.make_prompt_cache(it.model)
    batched.fill_directly(one, it, 40)
    token = mx.array([[1], [2], [3]])
    theirs = [batched._merged(layer, 3) for layer in one]
    ours = [batched._repeated(layer, 3) for layer in one]
    masks = [c[0].make_mask(1, return_array=False, window_size=None) for c in (ours, theirs)]
    assert masks[0] is None and isinstance(masks[1], mx.array)
    wanted, found = (it.model(token, cache=caches) for caches in (theirs, ours))
    assert mx.allclose(found, wanted, atol=1e-5).item() and one[0].offset == 40
