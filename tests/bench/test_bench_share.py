"""`mlxkv bench --share` and `render`: what is written, what is read; the power of a machine."""

from __future__ import annotations

import getpass
import json
import platform
import time
from pathlib import Path

import pytest
from bench_workers import ABOUT

from mlxkv.bench.whole import power, share
from mlxkv.cli import main
from mlxkv.errors import UserError
from mlxkv.scrub import LARGEST, clean, public_name

ROOT = Path(__file__).parents[2]


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
    error = f"OSError 4/8: ada.lovelace at analytical: '{name}/x.bin' and /opt/secret/lib.so, ~/key"
    workers.answers["about"] = lambda r: ABOUT | {"model": ABOUT["model"] | {"name": name}}
    workers.answers["gate"] = lambda r: {"preset": "int4", "ok": False, "reason": error}
    workers.answers["run"] = lambda r: {"error": error}
    data = shared(capsys, workers, tmp_path / "a.json", "--model", name)
    text = json.dumps(data)
    for word in ("ada", "lovelace", "analytical", "home", "opt", "secret", str(tmp_path)):
        assert word not in text
    assert data["model"]["name"] == "my-model" and data["machine"]["system"] == "Linux 6.1.0 x86_64"
    assert data["rows"][0]["error"] == "OSError 4/8: USER at HOST: 'x.bin' and lib.so, key"


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("/Volumes/Acme Corp/data: error", "data: error"),
        ("/Volumes/Acme Corp: error", "PATH: error"),
        ("in '/Users/John Smith/proj/foo.h' and '/opt/key'", "in 'foo.h' and 'key'"),
        ("in '/Volumes/John's Disk/foo.h', line 3", "in 'foo.h', line 3"),
        ('in "/opt/John\'s key/foo.h"', 'in "foo.h"'),
        ("in \u201c/Users/John Smith/foo.h\u201d", "in \u201cfoo.h\u201d"),
        ("'/Users/John Smith' is no file", "'PATH' is no file"),
        ("/Users/john/Library/My Secret Folder/x.metal:3:1: error", "x.metal:3:1: error"),
        ("/users/john/x y.metal:3\n/HOME/Jo Li/z\nrest 1/2", "x y.metal:3\nz\nrest 1/2"),
        ("/System/Volumes/Data/Users/Jo Li/z: no", "z: no"),
        ("-I/Users/Jo Li/include", "include"),
        ("file:///Users/Jo Li/z: no", "file:z: no"),
        ("(/private/var/folders/x y/z.metal:3)", "(z.metal:3)"),
        ("~/My Secret Folder/x.metal:3: error", "x.metal:3: error"),
        ("@HOME@/My Secret Folder/x.metal:3: error", "x.metal:3: error"),
        ("/home/ada lovelace/x.metal:3: error", "x.metal:3: error"),
        ("/home/adam/x.metal:3: error", "x.metal:3: error"),
        ("/home/ada/x.metal:3: error and ~/key", "x.metal:3: error and key"),
        ("ADA.Lovelace at Analytical and ANALYTICAL.LOCAL", "USER at HOST and HOST"),
        ("couldn't build 'x' at 4/8", "couldn't build 'x' at 4/8"),
        ("'/' and / and ~", "'/' and / and ~"),
    ],
)
def test_paths_with_spaces_and_names_in_capitals(text, shared, monkeypatch, tmp_path):
    home = str(tmp_path / "Ada Love")
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("LOGNAME", "ada.lovelace")
    monkeypatch.setattr(platform, "node", lambda: "analytical.local")
    assert clean(text.replace("@HOME@", home)) == shared
    monkeypatch.setenv("HOME", "/home/ada")
    if "@HOME@" not in text:
        assert clean(text) == shared


def test_long_texts_are_cleaned_in_time():
    begun = time.process_time()  # of this process alone: others may be busy
    for part in ("/a", "/Users", "'/", "x", "/Users/a ", "~/", "\u201c/", "'/x'y", "'/x "):
        clean(part * 20_000)
    assert time.process_time() - begun < 5


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("smollm2", "smollm2"),
        ("mlx-community/Qwen3-4B-4bit", "mlx-community/Qwen3-4B-4bit"),
        ("/Users/ada/models/gone", "gone"),
        ("~/models/gone", "gone"),
        ("../gone", "gone"),
    ],
)
def test_public_names_of_models(name, public):
    assert public_name(name) == public


def test_a_relative_folder_is_reduced_too(tmp_path, monkeypatch):
    (tmp_path / "private" / "model-1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert public_name("private/model-1") == "model-1"


def test_share_alone_takes_a_new_name_each_time(capsys, workers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for options in (["--share"], ["--share", "--kv", "int4"]):
        assert main(["bench", *options]) == 0
    names = sorted(file.name for file in tmp_path.iterdir())
    day = share.read(tmp_path / names[0])["date"]
    assert names == [f"mlxkv-bench-chip-9-{day}-2.json", f"mlxkv-bench-chip-9-{day}.json"]


def test_a_file_that_cannot_be_written_costs_only_itself(capsys, workers, monkeypatch, tmp_path):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert main(["bench", "--share", str(tmp_path / "a.json"), "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["rows"] and "No space left" in err


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
        "a.json": ("{", "not valid JSON"),
        "b.json": ("[1]", "not a file of"),
        "c.json": (spoilt(version=2), "version 2 of the format; this mlxkv reads 1"),
        "d.json": (spoilt(rows=[rows[0] | {"tokens_per_second": "x"}]), "tokens_per_second"),
        "e.json": (spoilt(machine={}), "parts missing"),
        "f.json": (spoilt(rows=[rows[0] | {"peak_bytes": float("inf")}]), "has Infinity"),
        "g.json": (spoilt(rows={}), "rows is not a list"),
        "h.json": (spoilt(versions={"mlxkv": 1, "mlx": "1", "mlx-lm": "1"}), "mlxkv is not"),
        "i.json": (" " * (LARGEST + 1), "larger than"),
        "j.json": ("\udcff", "not valid JSON"),
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


def test_power_of_a_mac():
    text = "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)\t87%; discharging;\n"
    assert power.mac_source(text) == "battery"
    assert power.mac_source("Now drawing from 'AC Power'\n") == "ac"
    assert power.mac_source("") == power.mac_mode("") == "unknown"
    settings = (
        "System-wide power settings:\nCurrently in use:\n standby 1\n lowpowermode         {}\n"
    )
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
