"""`mlxkv bench`: real runs, workers that die, order, tables, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import pytest
from bench_workers import RUN, shuffle

from mlxkv.bench import gate, plan, process, share, whole, worker
from mlxkv.cli import main
from mlxkv.config import parse_kv

ROOT = Path(__file__).parent.parent
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


def test_the_real_command(capsys, model_folder, without_torch):
    options = ("--model", model_folder, "--kv", "fp16", "--no-mlx-lm", "--contexts", "64")
    code, out, data = bench(capsys, *options, "--tokens", 2)
    assert code == 0 and [r["preset"] for r in data["rows"]] == ["fp16"]
    assert data["rows"][0]["runs"] == 2 and data["rows"][0]["of_copy"] > 0


def test_a_model_with_rotating_caches(capsys, gemma_folder, tmp_path, monkeypatch):
    """What workers do, in one process: ours is measured, mlx-lm's own quantized cache says why it
    is not."""
    monkeypatch.setattr(whole, "call", lambda request, *_, **__: worker.main(json.dumps(request)))
    file = tmp_path / "shared.json"
    options = ("--model", gemma_folder, "--kv", "int4", "--contexts", "320", "--tokens", 4)
    code, out, data = bench(capsys, *options, "--rounds", 1, "--share", file)
    assert code == 0
    assert list(data)[:6] == ["format", "version", "date", "machine", "versions", "model"]
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
    shared = share.read(file)
    assert shared["model"]["name"] == gemma_folder.name and shared["rows"] == data["rows"]
    assert str(gemma_folder.parent) not in file.read_text()


def test_ctrl_c_kills_the_worker(model_folder, without_torch):
    """SIGINT during the runs: the worker is gone, what was measured is printed."""
    command = [sys.executable, "-m", "mlxkv", "bench", "--model", str(model_folder), "--json"]
    command += ["--kv", "int4", "--contexts", "64", "--tokens", "1000000", "--no-mlx-lm"]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    )
    found = []
    try:
        deadline = time.monotonic() + 50
        while time.monotonic() < deadline and not found and child.poll() is None:
            time.sleep(0.2)
            found = [pid for pid, text in _children(child.pid) if '"run"' in text]
        assert found, "no worker that runs"
        child.send_signal(signal.SIGINT)
        out = child.communicate(timeout=60)[0]
        assert child.returncode == 130
        data = json.loads(out.splitlines()[-1])
        assert data["interrupted"] and data["rows"] == [] and data["gates"][0]["ok"]
        assert not os.path.exists(f"/proc/{found[0]}")
    finally:  # a worker that outlives its test takes a core from all that follow
        for pid in (child.pid, *found):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        child.wait()


def _children(parent: int) -> list[tuple[int, str]]:
    if not os.path.isdir("/proc/self"):
        pytest.skip("needs /proc")
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            if int(status[1]) == parent:
                text = (folder / "cmdline").read_bytes().decode(errors="replace")
                found.append((int(folder.name), text))
        except OSError:
            continue
    return found


DEATHS = {
    "import os; os.kill(os.getpid(), 9)": ("killed by SIGKILL", "out of memory"),
    "import os; os.abort()": ("killed by SIGABRT",),
    "import sys; print('half', end=''); sys.exit('no room')": ("ended with code 1: no room",),
    "print('no json')": ("ended without a result",),
    "import time; time.sleep(60)": ("no result within 2 s", "--timeout"),
}


@pytest.mark.parametrize("code", DEATHS)
def test_a_worker_that_dies_is_an_answer(monkeypatch, code):
    monkeypatch.setattr(process, "COMMAND", (sys.executable, "-c", code))
    answer = process.call({"task": "run"}, 2)
    assert list(answer) == ["error"]
    assert all(words in answer["error"] for words in DEATHS[code])


def test_a_worker_ends_when_nobody_waits_for_it(without_torch):
    request = json.dumps({"task": "about", "watched": True, "model": "tiny", "dtype": None})
    done = subprocess.run(
        [sys.executable, "-m", "mlxkv.bench.worker", request], stdin=subprocess.DEVNULL, cwd=ROOT
    )
    assert done.returncode == 3


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
    code, out, data = bench(capsys, "--share", tmp_path / "a.json")
    assert code == 130 and data["interrupted"] and "so far" in out
    assert [(r["preset"], r["runs"]) for r in data["rows"]] == [("fp16", 1)]
    assert share.read(tmp_path / "a.json")["interrupted"]


def test_faults_of_the_model_end_the_command(capsys, workers):
    workers.answers["about"] = lambda request: {"error": "[load] no such model", "user": True}
    assert main(["bench"]) == 2
    workers.answers["about"] = lambda request: {"error": "killed by SIGKILL"}
    assert main(["bench"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "[bench] killed by SIGKILL"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--contexts", "8"), ("[--contexts]", "at least 16")),
        (("--kv", "int5"), ("[--kv]", "got 'int5'")),
        (("--tokens", "0"), ("[--tokens]", "got 0")),
        (("--rounds", "-1"), ("[--rounds]", "got -1")),
        (("--cooldown", "-1"), ("[--cooldown]", "got -1")),
        (("--timeout", "nan"), ("[--timeout]", "got nan")),
        (("--dtype", "int8"), ("[--dtype]", "choose from float32")),
        (("--bits", "5"), ("[--bits]", "choose from 2, 3, 4")),
        (("--share", "/no/such/folder/x.json"), ("[--share]", "choose a file")),
        (("speed",), ("[bench]", "got 'speed'", "kernels, decode, load, reuse, batch, render")),
        (("--rounds", "2", "kernels"), ("[bench]", "--rounds has no effect", "got kernels")),
    ],
)
def test_bench_refuses(capsys, workers, options, words):
    assert main(["bench", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and all(word in err for word in words)
    assert workers.asked == []


def test_help_shows_options_and_commands(capsys):
    assert main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    words = ("--model", "--contexts", "--share", "--cooldown", "kernels", "decode", "render")
    assert all(word in text for word in words)


def test_defaults_depend_on_the_backend():
    small, large = (plan.make("int4", None, model="tiny").filled(b) for b in ("cpu", "metal"))
    assert (small.contexts, small.tokens, small.rounds) == ((1024,), 32, 1)
    assert large.contexts == (4096, 16384)
    assert plan.make("int4", "2k", model="tiny", rounds=3).filled("cpu").rounds == 3
