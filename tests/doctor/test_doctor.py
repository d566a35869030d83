"""`mlxkv doctor` on GPUs: a state for every kernel, the exit code, the file for an issue, the page of files."""

import getpass
import json
import platform
from types import SimpleNamespace

import mlx.core as mx
import pytest
from on_emulator import broken, counting, make, unbuildable

from mlxkv.cache import selftest
from mlxkv.cli import main
from mlxkv.doctor import checks, command, share
from mlxkv.formats.names import PICKS, parse_kv
from mlxkv.machine import machine_memory
from mlxkv.metal import gpu, launch, trust


@pytest.fixture(autouse=True)
def few(monkeypatch, tmp_path):
    """One needed format, one of --all, no golden table; notes and files in the test's folder."""
    monkeypatch.setattr(checks, "BUDGET", 3600)  # the machine may be busy
    monkeypatch.setattr(checks, "NEEDED", ("int4",))
    monkeypatch.setattr(checks, "DIMS", (64,))
    monkeypatch.setattr(checks, "MORE", ("int8",))
    monkeypatch.setattr(checks, "METHODS", ("srft-int4+g16",))
    monkeypatch.setattr(checks, "METHOD_DIMS", 64)
    monkeypatch.setattr(checks, "FOLLOWING", ("oja-0.75+int4", 32, 16))
    monkeypatch.setattr("mlxkv.doctor.command.golden_rows", lambda step, every=False: [GOLDEN])
    monkeypatch.setattr("mlxkv.console.cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(trust, "_machine", trust._machine.__wrapped__)  # some tests fake a GPU
    monkeypatch.chdir(tmp_path)


GOLDEN = {"table": "encode", "case": "a", "values": 9, "differ": 0, "wrong": 0}
GOLDEN |= {"rms": 0.0, "bound": 1e-6, "ok": True}


@pytest.fixture
def ask(capsys):
    """Runs the doctor with a factory of kernels: exit code, the document, the tables printed from it."""

    def ask(factory, *options) -> tuple[int, dict, str]:
        with launch.using(factory):
            code = main(["doctor", "--json", *options])
        data = json.loads(capsys.readouterr().out.splitlines()[-1])
        command._show(data, "--all" in options)
        return code, data, " ".join(capsys.readouterr().out.split())

    return ask


def states_of(data: dict) -> dict[tuple, str]:
    return {(row["preset"], row["body"]): row["state"] for row in data["kernels"]}


def test_what_is_needed_is_tried_and_the_rest_is_counted(ask):
    built = []
    code, data, shown = ask(counting(built, tiles=True))
    assert code == 0 and states_of(data) == {
        ("int4", "portable"): "right",
        ("int4", "tiles"): "right",
        ("int8", "portable"): "not tried",
        ("int8", "tiles"): "not tried",
        ("srft-int4+g16", "portable"): "none",
        ("srft-int4+g16", "tiles"): "none",
        ("oja-0.75+int4", "whiten"): "not tried",
    }
    first = data["kernels"][0]
    assert first["built"] and first["right"] and first["should_run"] and first["seconds"] > 0
    assert set(first["errors"]) == {"attend", "keys", "values", "prefill", "seal"}
    assert data["kernels_left"]["rows"] == 3 and data["kernels_left"]["seconds"] > 0
    assert "kernels: 2 of 2 that should run here are right" in shown
    assert "not tried: 3 more, about" in shown and "s: mlxkv doctor --all" in shown
    assert "srft-int4+g16 64 portable, srft-int4+g16 64 tiles: groups of 16" in shown


def test_all_of_them(ask):
    code, data, shown = ask(make, "--all")
    assert code == 0 and data["kernels_left"] is None and "not tried" not in shown
    found = states_of(data)
    assert found["int8", "portable"] == found["oja-0.75+int4", "whiten"] == "right"
    assert found["int8", "tiles"] == "none"  # this factory has none
    assert "kernels: 3 of 3 that should run here are right" in shown


def test_out_of_time_the_rest_is_named(ask, monkeypatch):
    monkeypatch.setattr(checks, "BUDGET", -1)
    code, data, shown = ask(make)
    assert code == 0 and states_of(data)["int4", "portable"] == "not tried"
    assert "not tried: 3 more (int4 at head dim 64, portable, and other methods): mlxkv" in shown
    assert data["kernels_left"]["seconds"] is None


@pytest.mark.parametrize(
    ("factory", "state", "said"),
    [
        (unbuildable("merge"), "not built", "program_source:1312:5: error: use of undeclared"),
        (
            broken("mlxkv_merge", "T(total * share)", "T(1.05f * total * share)"),
            "wrong",
            "attend is",
        ),
    ],
)
def test_a_kernel_that_should_run_and_does_not_fails_the_doctor(ask, factory, state, said):
    code, data, shown = ask(factory)
    row = data["kernels"][0]
    assert code == 1 and row["state"] == state and row["right"] is False
    assert row["built"] == (state == "wrong") and said in row["reason"]
    assert f"WRONG: int4 64 portable: {said}" in shown and "0 of 1 that should run" in shown
    if state == "not built":
        assert row["detail"].splitlines()[0].endswith("Unable to build metal library from source")


def test_a_wrong_golden_row_is_an_error(ask, monkeypatch):
    rows = [GOLDEN, GOLDEN | {"wrong": 3, "ok": False}]
    monkeypatch.setattr("mlxkv.doctor.command.golden_rows", lambda step, every=False: rows)
    code, _, shown = ask(None)
    assert code == 1 and "WRONG: encode a: 3 values" in shown and "1 of 2 cases right" in shown


def test_every_kernel_without_a_terminal_tells_how_far_it_is(monkeypatch, capsys):
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    def rows(step, every=False):
        for i in range(7):  # after 20 s, 40 s, ...; the clock is read once more where a line is due
            step(f"formats: case {i}")
        return [GOLDEN]

    monkeypatch.setattr(command, "golden_rows", rows)
    monkeypatch.setattr(checks, "rows", lambda step, every=False: [])
    monkeypatch.setattr(command, "_show", lambda data, every: None)
    assert main(["doctor", "--all"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "checking every format and kernel: this takes minutes",
        "formats: case 2",
        "formats: case 5",
    ]


def test_versions_that_were_not_tried_are_an_error(ask, monkeypatch):
    monkeypatch.setattr(command, "out_of_range", lambda: ["mlx 9.9"])
    code, _, shown = ask(None)
    assert code == 1 and "outside the tested range: mlx 9.9" in shown


def test_without_a_gpu_nothing_should_run(ask):
    code, data, shown = ask(None)
    assert code == 0 and data["kernels_left"] is None and "kernels: not used: no GPU here" in shown
    assert {row["reason"] for row in data["kernels"]} == {"no GPU here"}
    assert not any(row["should_run"] or row["body"] for row in data["kernels"])


def test_on_a_mac_what_failed_is_tried_again_and_what_killed_only_if_asked_to(ask, monkeypatch):
    factory = counting([], tiles=True)
    monkeypatch.setattr(mx.fast, "metal_kernel", factory)
    monkeypatch.setattr(
        checks, "speed", lambda *_: {"attend_us": 1.0, "plain_us": 3.0, "speedup": 3.0}
    )
    info = mx.device_info() | {"device_name": "Apple M4 Max"}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(gpu, "known_cores", lambda: None)
    config = parse_kv("int4")
    layout = checks.record_layout(config, *config.dims(64, 64))
    kernels = layout, 64, mx.float16, trust.TILES
    trust.note(kernels, "was off by 3")
    by_rows = *kernels[:3], trust.ROWS  # of the same bodies
    trust.note(by_rows, "was off by 3")
    code, data, shown = ask(factory)
    predicted = 4 * 8192 / 16 * 936 / (4 * 40 * 1.578) / 1000
    row = next(x for x in data["kernels"] if x["body"] == "tiles" and x["state"] == "right")
    assert row["predicted_us"] == pytest.approx(predicted) and f"1 ({predicted:.0f})" in shown
    assert code == 0 and states_of(data)["int4", "tiles"] == "right" and "3.0x" in shown
    assert trust.why_not(kernels) is trust.why_not(by_rows) is None
    with monkeypatch.context() as patch:
        patch.setattr(trust.os, "getpid", lambda: 1 << 30)
        for _ in range(trust.DEATHS):
            trust._write(trust.TRYING, kernels)
    monkeypatch.setattr(selftest, "_results", {})
    code, data, shown = ask(factory)
    assert code == 1 and states_of(data)["int4", "tiles"] == "did not run"
    assert "WRONG: int4 64 tiles: processes ended while they tried these tiles" in shown
    assert ask(factory, "--all")[0] == 0
    assert trust.why_not(kernels) is None


def test_the_gpu_of_a_virtual_machine_has_no_tiles(ask, monkeypatch):
    factory = unbuildable("attend_tile", tiles=True)
    monkeypatch.setattr(mx.fast, "metal_kernel", factory)
    monkeypatch.setattr(checks, "speed", lambda *_: {})
    info = mx.device_info() | {"device_name": "Apple Paravirtual device"}
    assert ask(factory)[0] == 1
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert ask(factory)[0] == 0


def test_need_comes_first(monkeypatch):
    monkeypatch.undo()
    needed = checks.cases(every=False)
    assert needed[:3] == [("int4", 128), ("int8", 128), ("fill-2.25", 128)] and len(needed) == 15
    assert checks.cases()[:15] == needed and len(set(checks.cases())) == len(checks.cases())


def test_kernels_of_all_that_people_are_told_to_pick_are_needed(monkeypatch):
    monkeypatch.undo()
    for dims in checks.DIMS:
        needed = [stood_for(name, dims) for name, own in checks.cases(every=False) if own == dims]
        picks = [name for name in PICKS if parse_kv(name).compresses]
        assert {"fill-3", "fill-2.25"} < set(picks)
        assert {name for name in picks if stood_for(name, dims) not in needed} == set()


def stood_for(name: str, dims: int):
    return selftest.representative_config(parse_kv(name), dims)


# -- the file for an issue


def test_the_memory_of_a_container(subtests, tmp_path):
    """Limits of both versions of cgroups, of groups around it, and none."""
    whole, gib = machine_memory(tmp_path), 1 << 30
    assert whole >= machine_memory() > 0
    v1 = "memory/{}memory.limit_in_bytes"
    for name, groups, limits, expected in (
        ("none", "0::/", {"memory.max": "max"}, whole),
        ("the top", "0::/", {"memory.max": gib}, gib),
        ("around", "0::/a/b", {"a/memory.max": gib, "a/b/memory.max": "max"}, gib),
        ("both", "0::/a/b", {"a/memory.max": 2 * gib, "a/b/memory.max": gib}, gib),
        ("its own at the top", "0::/docker/5", {"memory.max": gib}, gib),
        ("another's", "0::/a", {"b/memory.max": 1, "memory.max": "max"}, whole),
        ("version 1", "0::/\n4:cpu,memory:/a", {v1.format("a/"): gib}, gib),
        ("around, 1", "4:memory:/a/b", {v1.format(""): whole << 9, v1.format("a/"): gib}, gib),
        ("none, 1", "4:memory:/a\n3:cpu:/b", {v1.format(""): 0x7FFFFFFFFFFFF000, v1.format("b/"): 1}, whole),
        ("more than there is", "0::/", {"memory.max": whole * 2}, whole),
    ):  # fmt: skip
        root = tmp_path / name
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(groups + "\n")
        for file, limit in limits.items():
            path = root / "sys/fs/cgroup" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{limit}\n")
        with subtests.test(name):
            assert machine_memory(root) == expected


def test_a_shared_file_names_nobody(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path / "ada.lovelace"))
    monkeypatch.setenv("LOGNAME", "ada.lovelace")
    monkeypatch.setattr(platform, "node", lambda: "analytical.local")
    assert getpass.getuser() == "ada.lovelace"
    secret = f"ada.lovelace at analytical: {tmp_path}/ada.lovelace/x.metal:3:1: error: /opt/key no"

    def refuses(name, *names, **texts):
        raise RuntimeError(f"[metal::Device] Unable to build metal library\n{secret}")

    with launch.using(refuses):
        assert main(["doctor", "--share", str(tmp_path / "a.json")]) == 1
    text = (tmp_path / "a.json").read_text()
    for word in ("ada", "lovelace", "analytical", "opt", str(tmp_path)):
        assert word not in text, word
    data = json.loads(text)
    row = data["kernels"][0]
    assert row["reason"] == "USER at HOST: PATH:3:1: error: PATH"
    assert row["detail"].startswith("[metal::Device] Unable to build")
    assert data["machine"]["memory_bytes"] > 0 and data["versions"]["mlx"]
    assert set(data["machine"]["device"]) <= set(share.DEVICE)
    capsys.readouterr()


def test_a_shared_file_is_named_after_the_machine(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("mlxkv.machine._chip", lambda: "Apple M4 Max")
    for count in ("", "-2"):
        assert main(["doctor", "--share", "--json"]) == 0
        (said,) = [line for line in capsys.readouterr().err.splitlines() if "written" in line]
        assert said.startswith("written: mlxkv-doctor-apple-m4-max-") and said.endswith(
            f"{count}.json"
        )
    assert len(list(tmp_path.glob("mlxkv-doctor-*.json"))) == 2


def test_a_file_that_cannot_be_written_is_refused_before_the_work(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("mlxkv.doctor.command.golden_rows", None)
    for place in (tmp_path, tmp_path / "no" / "x.json"):
        assert main(["doctor", "--share", str(place)]) == 1
        assert f"[--share] cannot write {place}; choose" in capsys.readouterr().err
