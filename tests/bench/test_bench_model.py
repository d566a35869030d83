"""`mlxkv bench`: real runs, workers that die, order, tables, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import pytest
from bench_workers import ABOUT, RUN, shuffle

from mlxkv.bench.whole import gate, process, rows, worker
from mlxkv.bench.whole import run as whole
from mlxkv.cli import main
from mlxkv.formats.names import parse_kv

ROOT = Path(__file__).parents[2]
ROW_KEYS = {
    *("preset", "context", "prefill_seconds", "tokens_per_second", "peak_bytes", "kv_bytes"),
    *("baseline_ratio", "by", "prefill_tokens_per_second", "first_token_seconds", "token_ms"),
    *("read_bytes", "spread", "first_token_spread", "of_copy", "runs", "error"),
}


def bench(capsys, *args) -> tuple[int, str, dict]:
    """Exit code, stdout and its last line as JSON."""
    code = main(["bench", *(str(arg) for arg in args), "--json"])
    out = capsys.readouterr().out
    return code, out, json.loads(out.splitlines()[-1])


# -- real processes


def test_a_real_worker(model_folder):
    request = {"task": "run", "model": str(model_folder), "dtype": None, "bits": None}
    answer = process.call(request | {"preset": "fp16", "context": 64, "tokens": 2}, None)
    assert set(answer) == {*rows.NUMBERS, "by"} and answer["tokens_per_second"] > 0


def test_a_model_with_rotating_caches(capsys, gemma_folder, tmp_path, monkeypatch):
    """All tasks of workers, in this process: int4 is measured, mlx-lm's own quantized caches fail with a
    reason."""
    monkeypatch.setattr(whole, "call", lambda request, *_, **__: worker.main(json.dumps(request)))
    options = ("--model", gemma_folder, "--kv", "int4", "--contexts", "320", "--tokens", 4)
    code, out, data = bench(capsys, *options, "--rounds", 1)
    assert code == 0
    assert list(data)[:4] == ["date", "machine", "versions", "model"]
    assert [r["preset"] for r in data["rows"]] == ["fp16", "int4", "mlx-lm-kv8", "mlx-lm-kv4"]
    assert all(set(row) == ROW_KEYS for row in data["rows"])
    plain, ours, *theirs = data["rows"]
    for row in (plain, ours):
        assert row["error"] is None and row["runs"] == 2 and row["context"] == 320
        assert 0 < row["prefill_seconds"] < row["first_token_seconds"]
        assert row["tokens_per_second"] > 0 and row["of_copy"] > 0
        assert row["peak_bytes"] > data["model"]["weight_bytes"]
        assert 0 < row["read_bytes"] <= row["kv_bytes"]
    assert plain["baseline_ratio"] == 1 and ours["kv_bytes"] < plain["kv_bytes"]
    ratio = ours["tokens_per_second"] / plain["tokens_per_second"]
    assert ours["baseline_ratio"] == pytest.approx(ratio)
    for row in theirs:
        assert row["tokens_per_second"] is None and row["runs"] == 0
        assert row["error"].startswith("NotImplementedError")
    assert "NotImplementedError" in out and "int4: right" in out
    assert data["gates"][0]["checks"][0]["errors"]["keys"] > 0.01


# `mlxkv bench` whose workers answer at once. In a run they never do; their process id is written to a
# file when `call` waits for them.
INTERRUPTED = """
import pathlib, subprocess, sys
from mlxkv.bench.whole import process
from mlxkv.cli import main
worker = '''
import json, os, sys, time
answers = json.loads(os.environ["ANSWERS"])
task = json.loads(sys.argv[1])["task"]
if task == "run":
    time.sleep(300)
print(json.dumps(answers[task]))
'''
class Popen(subprocess.Popen):
    def wait(self, timeout=None):
        if timeout and '"run"' in self.args[-1]:
            file = pathlib.Path(sys.argv[1])
            file.with_suffix(".part").write_text(str(self.pid))
            file.with_suffix(".part").rename(file)
        return super().wait(timeout)
process.subprocess.Popen = Popen
process.COMMAND = (sys.executable, "-c", worker)
sys.exit(main(["bench", "--kv", "int4", "--no-mlx-lm", "--json"]))
"""


def test_ctrl_c_kills_the_worker(tmp_path):
    """SIGINT during a run: the worker is gone, what was measured is printed."""
    file, pipe = tmp_path / "pid", subprocess.PIPE
    answers = {"about": ABOUT, "gate": {"preset": "int4", "ok": True, "reason": None}}
    answers["copy"] = {"copy_gb_s": 1}
    command = [sys.executable, "-c", INTERRUPTED, str(file)]
    env = os.environ | {"ANSWERS": json.dumps(answers)}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=env) as child:
        try:
            while not file.exists():
                assert child.poll() is None, child.communicate()
                time.sleep(0.05)
            child.send_signal(signal.SIGINT)
            out, err = child.communicate()
        finally:
            child.kill()
    assert child.returncode == 130, err
    data = json.loads(out.splitlines()[-1])
    assert data["interrupted"] and data["rows"] == [] and data["gates"][0]["ok"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


DEATHS = {
    "import os; os.kill(os.getpid(), 9)": ("killed by SIGKILL", "out of memory"),
    "import os; os.abort()": ("killed by SIGABRT",),
    "import sys; print('half', end=''); sys.exit('no room')": ("ended with code 1: no room",),
    "print('no json')": ("ended without a result",),
    "import time; time.sleep(60)": ("no result within 0.5 s", "--timeout"),
}


@pytest.mark.parametrize("code", DEATHS)
def test_a_worker_that_dies_is_an_answer(monkeypatch, code):
    monkeypatch.setattr(process, "COMMAND", (sys.executable, "-c", code))
    answer = process.call({"task": "run"}, 0.5 if "sleep" in code else None)
    assert list(answer) == ["error"]
    assert all(words in answer["error"] for words in DEATHS[code])


def test_failures_inside_a_worker_are_one_line():
    ask = {"task": "run", "dtype": None, "bits": None, "preset": "int4", "context": 16}
    answer = worker.main(json.dumps(ask | {"model": "no-such-model", "tokens": 1}))
    assert answer["user"] and "no-such-model" in answer["error"]
    assert worker.main('{"task": "dance"}') == {"error": "KeyError: 'dance'"}


def test_a_red_preset_has_no_speed(capsys, workers):
    cache, pair = gate.filled(parse_kv("int4"), (1, 64, 64), mx.float32)
    shuffle(cache, "codes", 0)
    red = gate.judge(cache, pair, 2)
    right = workers.answers["gate"]
    broken = {"preset": "int4", "ok": False, "reason": red["reason"], "checks": [red]}
    workers.answers["gate"] = lambda r: broken if r["preset"] == "int4" else right(r)
    code, out, data = bench(capsys, "--kv", "int4,int8", "--contexts", "64,128")
    assert code == 1
    assert not [r for r in workers.asked if r["task"] == "run" and r["preset"] == "int4"]
    for row in data["rows"]:
        assert (row["tokens_per_second"] is None) == (row["preset"] == "int4")
    assert "int4: NOT TIMED: keys off by" in out
    # A gate that dies is red too.
    workers.answers["gate"] = lambda r: {"error": "killed"}
    assert bench(capsys, "--kv", "int4")[0] == 1


# -- order, rows, table


def test_runs_are_interleaved_and_a_failed_arm_is_not_tried_again(capsys, workers, monkeypatch):
    slept = []
    monkeypatch.setattr(whole.time, "sleep", slept.append)
    speeds = iter([40.0, 60.0])

    def run(request):
        if request["preset"] == "mlx-lm-kv4":
            return {"error": "[metal] no room"}
        speed = next(speeds) if request["preset"] == "int4" else 25.0
        return RUN | {"tokens_per_second": speed}

    workers.answers["run"] = run
    options = ("--kv", "int4,fp16", "--contexts", "1k", "--cooldown", 7)
    code, out, data = bench(capsys, *options)
    assert [r["preset"] for r in workers.asked if r["task"] == "run"] == [
        *("fp16", "int4", "mlx-lm-kv8", "mlx-lm-kv4"),
        *("mlx-lm-kv8", "int4", "fp16"),
    ]
    assert slept == [7] * 6 and code == 0
    plain, ours, _, failed = data["rows"]
    assert ours["tokens_per_second"] == 50 and ours["spread"] == pytest.approx(0.4)
    assert ours["baseline_ratio"] == 2 and failed["error"] == "[metal] no room"
    assert ours["of_copy"] == pytest.approx((100 + 200) * 50 / 2e4)  # the better of two copies
    assert "NOISY" in out and "int4 at 1024" in out
    assert "no room" in out and data["machine"]["copy_gb_s"] == 2e-5


def test_an_arm_that_fails_later_keeps_its_numbers_and_the_reason(capsys, workers):
    answers = iter([RUN, RUN, {"error": "gone"}, RUN])
    workers.answers["run"] = lambda request: next(answers)
    code, out, data = bench(capsys, "--kv", "int4", "--no-mlx-lm")
    assert code == 1 and "int4*" in out
    assert data["rows"][1]["runs"] == 1 and data["rows"][1]["error"] == "gone"


def test_ctrl_c_prints_what_is_measured(capsys, workers, tmp_path):
    answers = iter([RUN])

    def run(request):
        try:
            return next(answers)
        except StopIteration:
            raise KeyboardInterrupt from None

    workers.answers["run"] = run
    code, out, data = bench(capsys)
    assert code == 130 and data["interrupted"] and "so far" in out
    assert [(r["preset"], r["runs"]) for r in data["rows"]] == [("fp16", 1)]


def test_faults_of_the_model_end_the_command(capsys, workers):
    workers.answers["about"] = lambda request: {"error": "[load] no such model", "user": True}
    assert main(["bench"]) == 2
    workers.answers["about"] = lambda request: {"error": "killed by SIGKILL"}
    assert main(["bench"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "[bench] killed by SIGKILL"


def test_bench_refuses(subtests, capsys, workers):
    for options, words in [
        (("--contexts", "8"), ("[--contexts]", "at least 16")),
        (("--kv", "int5"), ("[--kv]", "got 'int5'")),
        (("--tokens", "0"), ("[--tokens]", "got 0")),
        (("--rounds", "-1"), ("[--rounds]", "got -1")),
        (("--cooldown", "-1"), ("[--cooldown]", "got -1")),
        (("--timeout", "nan"), ("[--timeout]", "got nan")),
        (("--dtype", "int8"), ("[--dtype]", "choose from float32")),
        (("--bits", "5"), ("[--bits]", "choose from 2, 3, 4")),
        (("speed",), ("[bench]", "got 'speed'", "kernels, decode, batch")),
        (("--rounds", "2", "kernels"), ("[bench]", "--rounds has no effect", "got kernels")),
    ]:
        with subtests.test(options=options, words=words):
            assert main(["bench", *options]) == 2
            out, err = capsys.readouterr()
            assert out == "" and len(err.splitlines()) == 1 and all(word in err for word in words)
            assert workers.asked == []


def test_help_shows_options_and_commands(capsys):
    assert main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    words = ("--model", "--contexts", "--cooldown", "kernels", "decode", "batch")
    assert all(word in text for word in words)
