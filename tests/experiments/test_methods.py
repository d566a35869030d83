"""The page of all methods: evaluations in processes, one table of many reports."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from small_models import QWEN

from experiments import methods
from mlxkv.errors import MachineError, UserError

ROW = {"kl_mean": 0.0, "kl_p99": 0.0, "retrieval": {"single": 1.0, "multi-query": 0.5}}


def report(name: str, **bits: float) -> dict:
    rows = {preset: ROW | {"bits_per_value": x} for preset, x in bits.items()}
    return {"model": name, "contexts": [1024], "rows": {"1024": rows}, "windows": {}}


def test_rows_go_from_many_bits_to_few():
    lines = methods.table([report("a", low=2.0, fp16=16.0, mid=4.0)], 1024)
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["fp16", "mid", "low"]
    assert lines[2].endswith("| 0 | 0 | 100 % / 50 % |")


def test_bits_that_differ_by_model_are_a_range():
    lines = methods.table([report("a", int4=4.5), report("b", int4=4.25)], 1024)
    assert "| 4.25 to 4.50 |" in lines[2]


def test_what_a_report_lacks_stays_empty():
    one, two = report("a", int4=4.5, int2=2.25), report("b", int4=4.5)
    two["rows"]["1024"]["int4"] = {"bits_per_value": 4.5, "retrieval": {"single": 1.0}}
    lines = methods.table([one, two], 1024)
    assert lines[2].endswith("| 0 | 0 | 100 % / 50 % |  |  | 100 % /  |")
    assert lines[3].endswith("| 0 | 0 | 100 % / 50 % |  |  |  |")


def test_windows_of_ones_own_are_named():
    lines = methods.page([report("a", int4=4.5)], methods.OWN)
    assert lines[0] == "## 1024 tokens, windows: each method's own"
    assert methods.page([report("a", int4=4.5)], "64,64")[0].endswith("64,64 tokens")


def test_every_preset_that_compresses_has_a_row():
    names = list(methods.every())
    assert "int4" in names and "oscar-int2" in names
    assert not {"fp16", "learned-int4"} & set(names)


def test_an_evaluation_that_fails_is_one_line(tmp_path, monkeypatch):
    def fail(command, **options):
        return SimpleNamespace(returncode=2, stderr="noise\n[--model] no such model\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(MachineError, match=r"nope, windows 64,64: \[--model\] no such model"):
        methods.main(["--out", str(tmp_path), "--models", "nope"])


@pytest.mark.parametrize("arguments", (["--kv", "int5"], ["--out", "/dev/null/x"]))
def test_a_slip_costs_nothing(tmp_path, arguments, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("nothing may run"))
    with pytest.raises(UserError):
        methods.main(["--out", str(tmp_path), *arguments])


@pytest.mark.slow
def test_the_page_of_a_trained_model(tmp_path):
    command = [sys.executable, "-m", "experiments.methods", "--out", str(tmp_path)]
    command += ["--models", QWEN, "--kv", "int4,naive-int2", "--context", "512"]
    command += ["--decode", "4", "--questions", "1", "--shares", "2", "--side", "2"]
    subprocess.run(command, check=True, capture_output=True)
    text = (tmp_path / "methods.md").read_text()
    data = json.loads((tmp_path / "tiny-qwen-64-64" / "report.json").read_text())
    row = data["rows"]["512"]["naive-int2"]
    assert f"| {methods.figure(row['kl_mean'])} |" in text and row["kl_mean"] > 0
    assert text.count("## 512 tokens") == 1 and "<svg" in (tmp_path / "methods.svg").read_text()
