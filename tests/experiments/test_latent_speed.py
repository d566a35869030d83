"""Latents: their bytes, and steps timed against mlx-lm's own."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from on_emulator import make_mma

from experiments import latent_bytes, latent_speed
from mlxkv.metal import launch


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """One shape, narrow outside of its attention."""
    shape = latent_speed.SHAPES["GLM-4.7-Flash"] | {"hidden_size": 128, "q_lora_rank": 64}
    monkeypatch.setattr(latent_speed, "SHAPES", {"GLM": shape})


def run(tmp_path, *arguments: str) -> dict[tuple[str, str], dict]:
    """{(cache, by): row} of a run at 500 tokens."""
    out = tmp_path / "speed.json"
    asked = ["--tokens", "500", "--steps", "1", "--out", str(out), *arguments]
    latent_speed.main(asked)
    return {(row["cache"], row["by"]): row for row in json.loads(out.read_text())["rows"]}


def test_rows_say_bytes_error_and_times(tmp_path, capsys):
    found = run(tmp_path, "--kv", "int4+rope16,int4")
    by = "plain ops (no GPU here)"
    assert list(found) == [("bf16", "mlx-lm"), ("int4+rope16", by), ("int4", by)]
    sizes = [row["bytes"] for row in found.values()]
    assert sizes == sorted(sizes, reverse=True)
    for row in found.values():
        assert 0 < row["off"] < 0.02 and row["attention"] > 0 < row["layer"]
    assert "int4+rope16" in capsys.readouterr().out


def test_the_kernel_is_compared_before_it_is_timed(tmp_path):
    with launch.using(make_mma):
        found = run(tmp_path, "--kv", "hadamard-int4")
    row = found["hadamard-int4", "cpu tile kernels"]
    assert 0 < row["off"] < 0.005 and row["attention"] > 0


def test_a_wrong_cache_is_not_timed(tmp_path, monkeypatch, capsys):
    right = latent_speed.attend
    monkeypatch.setattr(latent_speed, "attend", lambda *given: 1.0625 * right(*given))
    found = run(tmp_path, "--kv", "int4")
    assert "attention" in found["bf16", "mlx-lm"]
    (row,) = [row for (name, _), row in found.items() if name == "int4"]
    assert "off by 0.06" in row["error"] and "attention" not in row
    assert "off by 0.06" in " ".join(capsys.readouterr().out.split())


def test_a_kernel_that_does_not_build_is_plain_ops_with_its_reason(tmp_path):
    def broken(**names):
        raise RuntimeError("error: no such instruction")

    broken.tiles = True
    with launch.using(broken):
        found = run(tmp_path, "--kv", "naive-int3")
    (row,) = [row for (name, _), row in found.items() if name == "naive-int3"]
    assert "plain ops" in row["by"] and "no such instruction" in row["by"]
    assert row["attention"] > 0 and mx.default_device() == mx.Device(mx.cpu)


def test_rows_stop_when_the_time_is_over(tmp_path, capsys):
    latent_speed.main(["--tokens", "500", "--steps", "1", "--seconds", "0"])
    assert "no time" in capsys.readouterr().err


def test_bytes_are_those_of_the_page(capsys):
    latent_bytes.main(["--tokens", "600", "--kv", "int4,int4+rope16"])
    said = capsys.readouterr().out.split("\n")
    page = Path(__file__).parents[2] / "docs/results/latents.md"
    for preset in ("int4", "int4+rope16"):
        bits, size, share = next(x.split()[1:4] for x in said if x.split()[:1] == [preset])
        start = f"| {bits} | {size} | {share.lstrip('0')} |"
        assert start in page.read_text(encoding="utf-8")
