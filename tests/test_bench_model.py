"""`mlxkv bench`: gates, workers that die, tables, shared files."""

from __future__ import annotations

import getpass
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from random_models import random_model

from mlxkv.bench import gate, models, plan, power, process, reading, share, whole, worker
from mlxkv.cli import main
from mlxkv.config import PRESETS, parse_kv
from mlxkv.errors import UserError

ROOT = Path(__file__).parent.parent
RUN = {"by": "MLX", "prefill_seconds": 2.0, "prefill_tokens_per_second": 500.0, "kv_bytes": 300}
RUN |= {"first_token_seconds": 2.1, "tokens_per_second": 50.0, "token_ms": 20.0, "peak_bytes": 900}
RUN |= {"read_bytes": 200}
ABOUT = {
    "machine": {
        "system": f"Linux 6.1.0-{platform.node()} x86_64",
        "chip": "Chip | <9>",
        "memory_bytes": 1 << 34,
        "backend": "cpu",
        "device": "Chip 9",
        "power": {"source": "ac", "mode": "normal"},
        "copy_gb_s": 1e-5,
    },
    "versions": {"mlxkv": "0.1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2", "numpy": None},
    "model": {"name": "tiny", "weights": "loaded", "dtype": "float32", "bits": None},
}
ABOUT["model"]["weight_bytes"] = 100
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


@pytest.fixture
def workers(monkeypatch):
    """Workers without processes: `answers[task]` takes the request. `asked` lists what was asked."""

    class Workers:
        answers = {
            "about": lambda request: ABOUT,
            "copy": lambda request: {"copy_gb_s": 2e-5},
            "gate": lambda request: {"preset": request["preset"], "ok": True, "reason": None},
            "run": lambda request: RUN,
        }
        asked: list[dict] = []

    found = Workers()
    found.answers, found.asked = dict(Workers.answers), []

    def call(request: dict, timeout: float) -> dict:
        found.asked.append(request)
        return found.answers[request["task"]](request)

    monkeypatch.setattr(whole, "call", call)
    return found


# -- real processes


def test_a_model_with_rotating_caches(capsys, gemma_folder, tmp_path):
    """Everything for real: ours is measured, mlx-lm's own quantized cache says why it is not."""
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
        assert row["tokens_per_second"] > 0 and 0 < row["of_copy"]
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


def test_the_real_command_in_a_terminal_and_its_end_by_ctrl_c(model_folder):
    """SIGINT during the runs: the worker is gone, what was measured is printed."""
    command = [sys.executable, "-m", "mlxkv", "bench", "--model", str(model_folder), "--json"]
    command += ["--kv", "int4", "--contexts", "64", "--tokens", "1000000", "--no-mlx-lm"]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    )
    deadline, found = time.monotonic() + 50, []
    while time.monotonic() < deadline and not found and child.poll() is None:
        time.sleep(0.2)
        found = [pid for pid, text in _children(child.pid) if '"run"' in text]
    assert found, "no worker that runs"
    child.send_signal(signal.SIGINT)
    out = child.communicate(timeout=20)[0]
    assert child.returncode == 130
    data = json.loads(out.splitlines()[-1])
    assert data["interrupted"] and data["rows"] == [] and data["gates"][0]["ok"]
    assert not os.path.exists(f"/proc/{found[0]}")


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


def test_a_worker_ends_when_nobody_waits_for_it():
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


# -- the gate


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "fp16"])
def test_every_preset_is_right_on_gaussian_values(preset):
    cache, pair = gate.filled(parse_kv(preset), (1, 64, 64), mx.float32)
    found = gate.judge(cache, pair, 2)
    assert found["reason"] is None
    # The bound of the codes means something: noise as large as what was encoded is far above it.
    assert 0 < found["errors"]["keys"] < found["bounds"]["keys"] < 1


def test_sides_windows_and_types_of_their_own():
    config = replace(parse_kv("int8/int2"), sink=0)
    cache, pair = gate.filled(config, (2, 64, 128), mx.bfloat16)
    found = gate.judge(cache, pair, 4)
    assert found["reason"] is None and found["shape"] == "H4.G2.D64"
    assert found["errors"]["keys"] < 0.02 < found["errors"]["values"]


def _shuffle(cache, part: str, side: int) -> None:
    arrays = cache._store._pages[side]._arrays
    x = arrays[part]
    order = mx.random.permutation(x.shape[2], key=mx.random.key(3))
    arrays[part] = mx.contiguous(mx.take(x, order, axis=2))


@pytest.mark.parametrize(("side", "name"), [(0, "keys"), (1, "values")])
@pytest.mark.parametrize("preset", ["int8", "int4", "int2"])
def test_shuffled_codes_are_found(preset, side, name):
    cache, pair = gate.filled(parse_kv(preset), (1, 64, 64), mx.float32)
    _shuffle(cache, "codes", side)
    reason = gate.judge(cache, pair, 2)["reason"]
    assert reason.startswith(f"{name} off by")


def test_wrong_attention_and_wrong_windows_are_found(monkeypatch):
    cache, pair = gate.filled(parse_kv("int4"), (1, 64, 64), mx.float32)
    right = gate.attention.attend
    for factor, words in ((1.01, "attention off"), (float("nan"), "attention off by nan")):
        monkeypatch.setattr(gate.attention, "attend", lambda *a, f=factor: f * right(*a))
        found = gate.judge(cache, pair, 2)
        assert words in found["reason"] and json.dumps(found, allow_nan=False)
    monkeypatch.undo()
    cache._live[0][:, :, 3] = 0
    assert "keys in windows off" in gate.judge(cache, pair, 2)["reason"]


def subject(family: str = "gemma3_text", **changes) -> models.Subject:
    from random_models import config_of

    return models.Subject(
        random_model(family, **changes), config_of(family) | changes, "random", mx.float32
    )


def test_a_whole_model_passes_its_gate():
    found = gate.check(subject(), "int4")
    assert found["ok"] and found["reason"] is None
    assert [c["shape"] for c in found["checks"]] == ["H4.G2.D64"]


def test_nan_in_the_logits_and_nothing_to_compress_are_red():
    it = subject("llama")
    it.model.model.norm.weight = mx.full(it.model.model.norm.weight.shape, float("nan"))
    found = gate.check(it, "int4")
    assert not found["ok"] and "NaN or infinity in the logits at token 1" in found["reason"]
    with pytest.warns(UserWarning, match="NOTHING"):
        found = gate.check(subject("gemma2"), "int4")
    assert not found["ok"] and "NOTHING IS COMPRESSED" in found["reason"]


def test_a_red_preset_has_no_speed(capsys, workers):
    cache, pair = gate.filled(parse_kv("int4"), (1, 64, 64), mx.float32)
    _shuffle(cache, "codes", 0)
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
        (("speed",), ("[bench]", "got 'speed'", "kernels, decode, render")),
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


# -- bytes that are read


@pytest.mark.parametrize("preset", ["fp16", "int4", "mlx-lm-kv4"])
def test_bytes_read_are_those_of_stored_tokens(preset):
    from mlxkv.bench.decode import WARM, measure

    it = subject("llama")
    found = measure(it, preset, 300, "prefill", 4)
    tokens, values = 300 + WARM + 4, 2 * 2 * 2 * 64  # layers, sides, heads, dims
    if preset == "fp16":
        assert found["read_bytes"] == tokens * values * 4 < found["kv_bytes"]
    elif preset == "mlx-lm-kv4":  # scales and biases in float32, one pair for 64 values
        assert found["read_bytes"] == pytest.approx(tokens * values * (4 + 64 / 64) / 8, rel=0.01)
    else:
        pages = (tokens - 128) // 64 * 64
        assert found["read_bytes"] == values * (pages * 4.5 / 8 + (tokens - pages) * 4)


def test_weights_that_a_token_reads():
    tied, untied = (subject("llama", tie_word_embeddings=t) for t in (True, False))
    table = 64 * 32 * 4
    assert reading.weight_bytes(untied.model, untied.config) == reading.weight_bytes(
        tied.model, tied.config
    )
    assert sum(x.nbytes for _, x in reading.tree_flatten(untied.model.parameters())) == (
        reading.weight_bytes(untied.model, untied.config) + table
    )
    experts = subject("gpt_oss")
    weights = dict(reading.tree_flatten(experts.model.parameters()))
    routed = sum(x.nbytes for name, x in weights.items() if ".experts." in name)
    looked_up = table if "lm_head.weight" in weights else 0
    assert reading.weight_bytes(experts.model, experts.config) == pytest.approx(
        sum(x.nbytes for x in weights.values()) - looked_up - routed / 2  # 2 of 4 experts
    )
    assert routed


# -- power


def test_power_of_a_mac():
    text = "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)\t87%; discharging;\n"
    assert power.mac_source(text) == "battery"
    assert power.mac_source("Now drawing from 'AC Power'\n") == "ac"
    assert power.mac_source("") == power.mac_mode("") == "unknown"
    settings = "System-wide power settings:\nCurrently in use:\n standby 1\n lowpowermode         {}\n"
    assert power.mac_mode(settings.format(1)) == "low power"
    assert power.mac_mode(settings.format(0)) == "normal"
    assert power.mac_mode(" powermode            2\n") == "high power"


def test_power_of_a_linux_machine(tmp_path):
    def supply(name: str, **values):
        (tmp_path / name).mkdir(exist_ok=True)
        for key, value in values.items():
            (tmp_path / name / key).write_text(value + "\n")

    assert power.linux_source(tmp_path) == "unknown"
    supply("BAT0", type="Battery", status="Discharging")
    assert power.linux_source(tmp_path) == "battery"
    supply("AC", type="Mains", online="0")
    assert power.linux_source(tmp_path) == "battery"
    supply("AC", online="1")
    assert power.linux_source(tmp_path) == "ac"
    assert set(power.power()) == {"source", "mode"}


# -- shared files


def shared(capsys, workers, file: Path, *options) -> dict:
    assert main(["bench", "--share", str(file), "--kv", "int4", *options]) in (0, 1)
    capsys.readouterr()
    return json.loads(file.read_text())


def test_a_shared_file_names_nobody(capsys, workers, monkeypatch, tmp_path):
    home = tmp_path / "home" / "ada.lovelace"
    (home / "my-model").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LOGNAME", "ada.lovelace")
    monkeypatch.setattr(platform, "node", lambda: "analytical.local")
    assert getpass.getuser() == "ada.lovelace"
    name = str(home / "my-model")
    error = f"OSError: ada.lovelace at analytical: '{name}/x.bin' and /opt/secret/lib.so, ~/key 4/8"
    workers.answers["about"] = lambda r: ABOUT | {"model": ABOUT["model"] | {"name": name}}
    workers.answers["gate"] = lambda r: {"preset": "int4", "ok": False, "reason": error}
    workers.answers["run"] = lambda r: {"error": error}
    data = shared(capsys, workers, tmp_path / "a.json", "--model", name)
    text = json.dumps(data)
    for word in ("ada", "lovelace", "analytical", "home", "opt", "secret", str(tmp_path)):
        assert word not in text
    assert data["model"]["name"] == "my-model" and data["machine"]["system"] == "Linux 6.1.0 x86_64"
    assert data["rows"][0]["error"] == "OSError: USER at HOST: 'x.bin' and lib.so, key 4/8"


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("tiny", "tiny"),
        ("mlx-community/Qwen3-4B-4bit", "mlx-community/Qwen3-4B-4bit"),
        ("/Users/ada/models/gone", "gone"),
        ("~/models/gone", "gone"),
        ("../gone", "gone"),
    ],
)
def test_public_names_of_models(name, public):
    assert share.public_name(name) == public


def test_a_relative_folder_is_reduced_too(tmp_path, monkeypatch):
    (tmp_path / "private" / "model-1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert share.public_name("private/model-1") == "model-1"


def test_share_alone_takes_a_new_name_each_time(capsys, workers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for options in (["--share"], ["--share", "--kv", "int4"]):
        assert main(["bench", *options]) == 0
    names = sorted(file.name for file in tmp_path.iterdir())
    day = share.read(tmp_path / names[0])["date"]
    assert names == [f"mlxkv-bench-chip-9-{day}-2.json", f"mlxkv-bench-chip-9-{day}.json"]


def test_render_orders_and_escapes(capsys, workers, tmp_path):
    workers.answers["about"] = lambda r: ABOUT | {"model": ABOUT["model"] | {"name": "zeta"}}
    shared(capsys, workers, tmp_path / "a.json", "--contexts", "128,64")
    workers.answers["about"] = lambda r: ABOUT
    workers.answers["run"] = lambda r: {"error": "a | b <c>\nd"}
    shared(capsys, workers, tmp_path / "b.json", "--contexts", "32", "--no-mlx-lm")
    assert main(["bench", "render", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == "" and len(lines) == 2 + 2 + 8
    columns = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    assert [(c[2], c[3], c[4]) for c in columns[2:6]] == [
        *(("tiny, float32", "32", "fp16"), ("tiny, float32", "32", "int4")),
        *(("zeta, float32", "64", "fp16"), ("zeta, float32", "64", "int4")),
    ]
    assert columns[8][3] == "128" and columns[8][7] == "50.0"
    assert r"a \| b &lt;c&gt; d" in lines[2] and r"Chip \| &lt;9&gt;, 16.00 GiB, cpu" in lines[2]


def test_render_names_bad_files_and_goes_on(capsys, workers, tmp_path):
    good = shared(capsys, workers, tmp_path / "good.json")

    def spoilt(**changes) -> str:
        return json.dumps(good | changes)

    rows = good["rows"]
    bad = {
        "a.json": ("{", "not JSON"),
        "b.json": ("[1]", "not a file of"),
        "c.json": (spoilt(version=2), "version 2 of the format; this mlxkv reads 1"),
        "d.json": (spoilt(rows=[rows[0] | {"tokens_per_second": "x"}]), "tokens_per_second"),
        "e.json": (spoilt(machine={}), "parts missing"),
        "f.json": (spoilt(rows=[rows[0] | {"peak_bytes": float("inf")}]), "not JSON"),
        "g.json": (spoilt(rows={}), "rows is not a list"),
        "h.json": (spoilt(versions={"mlxkv": 1, "mlx": "1", "mlx-lm": "1"}), "mlxkv is not"),
        "i.json": (" " * (share.LARGEST + 1), "larger than"),
        "j.json": ("\udcff", "not JSON"),
    }
    for name, (text, _) in bad.items():
        (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert main(["bench", "render", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert [line.split()[1] for line in lines] == [f"{name}:" for name in sorted(bad)]
    for line, (_, words) in zip(lines, bad.values(), strict=True):
        assert words in line
    assert len(out.splitlines()) == 2 + len(rows)


def test_render_of_no_folder(capsys, tmp_path):
    for folder in (tmp_path / "none", tmp_path):
        assert main(["bench", "render", str(folder)]) == 2
    assert capsys.readouterr().out == ""


def test_the_results_in_the_repository_are_rendered_there(capsys):
    folder = ROOT / "docs" / "results" / "bench"
    assert main(["bench", "render", str(folder)]) == 0
    table = capsys.readouterr().out.strip()
    assert table in (folder / "README.md").read_text(encoding="utf-8")


def test_a_shared_file_of_another_kind_is_refused(tmp_path):
    file = tmp_path / "x.json"
    file.write_text('{"format": "mlxkv-bench", "version": true}')
    with pytest.raises(UserError, match="version True"):
        share.read(file)
