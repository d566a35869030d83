"""What a Mac's kernels are known for: one note for each format, and a mark while a process tries one."""

import json
import os
import signal
import subprocess
import sys
import time

import mlx.core as mx
import pytest
from failing_kernels import counting, unbuildable
from patience import PATIENCE

from mlxkv.cache import choose, selftest
from mlxkv.formats.presets import PRESETS
from mlxkv.formats.records import record_layout
from mlxkv.metal import launch, trust

INT4, INT8 = PRESETS["srft-int4+g64"], PRESETS["int8"]
DIMS = (64, 64)


def place(config, tiled: bool = True) -> tuple:
    return record_layout(config, *config.dims(*DIMS)), 64, mx.float16, tiled


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder, and a process that has tried nothing yet."""
    monkeypatch.setattr("mlxkv.console.cache_dir", lambda: tmp_path / "cache")
    trust.forget()
    yield tmp_path / "cache"
    trust.forget()


@pytest.fixture
def mac(folder, monkeypatch):
    """Makes a factory that of Metal."""

    def be(factory):
        monkeypatch.setattr(mx.fast, "metal_kernel", factory)
        monkeypatch.setattr(selftest, "_results", {})
        trust.forget()
        return launch.using(factory)

    return be


def gone() -> int:
    """The number of a process that has ended."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def mark(process: int, config=INT4, tiled: bool = True, deaths: int = 1, age: float = 0) -> None:
    """What a process leaves that is trying them; as many died of them before."""
    row = {"state": "trying", "process": process, "since": time.time() - age, "deaths": deaths}
    trust._change(trust._key(*place(config, tiled)), lambda _: row)
    trust.forget()


def test_a_format_that_fails_distrusts_itself_alone(folder):
    assert trust.why_not(*place(INT4)) is None  # not tried yet: it may be
    trust.note(*place(INT4)[:3], True)
    trust.note(*place(INT8)[:3], False, reason="attend is off by 3")
    trust.forget()
    assert trust.state(*place(INT4)) == trust.PASSED and trust.why_not(*place(INT4)) is None
    why = trust.why_not(*place(INT8))
    assert "attend is off by 3" in why and "mlxkv doctor" in why and "\n" not in why
    for other in ((place(INT8)[0], 128, mx.float16), (place(INT8)[0], 64, mx.bfloat16)):
        assert trust.state(*other) is None
    assert trust.state(*place(INT8, False)) is None
    file = folder / "kernels.json"
    assert file.stat().st_mode & 0o777 == 0o600 and sorted(os.listdir(folder)) == [
        "kernels.json",
        "kernels.lock",
    ]


def test_other_files_are_no_notes(subtests, folder):
    folder.mkdir()
    older = '{"device": "Apple M1", "mlx": "0.31.0", "text": "0"}'
    nested = "[" * 100_000
    for text in (
        "{",
        "[]",
        "null",
        "\xff",
        nested,
        '{"rows": 3}',
        '{"here": {}, "rows": []}',
        older,
    ):
        with subtests.test(text=text[:40]):
            trust.forget()
            (folder / "kernels.json").write_text(text, encoding="latin-1")
            assert trust.state(*place(INT4)) is None
            trust.note(*place(INT4)[:3], True)
            trust.forget()
            assert trust.state(*place(INT4)) == trust.PASSED


def test_notes_hold_for_one_gpu_system_version_and_text(subtests, folder, monkeypatch):
    trust.note(*place(INT4)[:3], False, reason="x")
    changes = {
        "GPU": (mx, "device_info", lambda: {"device_name": "another"}),
        "system": (trust.platform, "mac_ver", lambda: ("another", (), "")),
        "MLX": (trust, "version", lambda name: "another"),
        "mlxkv": (trust, "__version__", "another"),
        "texts": (trust, "body", lambda name: "another"),
        "texts before them": (trust, "header", lambda name: "another"),
    }
    for name, change in changes.items():
        with subtests.test(name), monkeypatch.context() as patch:
            patch.setattr(*change)
            trust._machine.cache_clear()
            trust.forget()
            assert trust.state(*place(INT4)) is None
    trust._machine.cache_clear()
    trust.forget()
    assert trust.state(*place(INT4)) == trust.FAILED


def test_a_folder_that_cannot_be_written_is_no_fault(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("mlxkv.console.cache_dir", lambda: tmp_path / "file" / "cache")
    trust.forget()
    with trust.trial(*place(INT4)):
        pass
    trust.note(*place(INT4)[:3], True)
    assert trust.state(*place(INT4)) == trust.PASSED  # as long as this process lives
    trust.forget()


def test_a_mark_is_there_while_a_kernel_is_tried(folder):
    read = lambda: json.loads((folder / "kernels.json").read_text())["rows"]  # noqa: E731
    with pytest.raises(KeyboardInterrupt), trust.trial(*place(INT4)):
        assert [row["process"] for row in read().values()] == [os.getpid()]
        assert trust.why_not(*place(INT4)) is None
        raise KeyboardInterrupt
    assert read() == {}
    trust.note(*place(INT4)[:3], True)
    with trust.trial(*place(INT4)):
        pass
    assert [row["state"] for row in read().values()] == ["passed"]


def test_what_a_process_died_of_is_not_tried_again(mac):
    built = []
    with mac(counting(built, tiles=True)):
        mark(gone())
        assert trust.state(*place(INT4)) == trust.DIED
        found = choose.plan(INT4, DIMS, mx.float16)
        assert found.label == "kernels"
        assert "processes ended while they tried these tiles, 2 in a row" in found.reason
        assert built and not any("tile" in name for name in built)
        mark(gone(), tiled=False)
        why = choose.plan(INT4, DIMS, mx.float16).reason
        assert why.startswith(choose.FAILED) and "mlxkv doctor --all" in why


def test_what_another_process_tries_is_tried_here_too(mac):
    with mac(counting([], tiles=True)):
        mark(os.getppid(), deaths=1)
        assert trust.state(*place(INT4)) is None
        assert choose.plan(INT4, DIMS, mx.float16).label == "tile kernels"
        assert trust.state(*place(INT4)) == trust.PASSED


def test_a_mac_tries_tiles_as_a_model_is_loaded(mac):
    """Nobody has to run doctor first; what failed once is not built again."""
    built = []
    with mac(counting(built, tiles=True)):
        assert choose.plan(INT4, DIMS, mx.float16).label == "tile kernels"
        assert not any("merge" in name for name in built)  # the portable body would be in vain
    assert trust.state(*place(INT4)) == trust.PASSED
    with mac(unbuildable("attend_tile", tiles=True)):
        assert choose.plan(INT4, DIMS, mx.float16).label == "kernels"
        assert "program_source:1312:5: error" in trust.why_not(*place(INT4))
        assert trust.state(*place(INT4, False)) == trust.PASSED
    with mac(counting(built := [], tiles=True)):
        assert choose.plan(INT4, DIMS, mx.float16).label == "kernels"
        assert not any("tile" in name for name in built)
        assert choose.plan(INT8, DIMS, mx.float16).label == "tile kernels"


# -- several processes

TRIES = """
import signal, sys, time
from pathlib import Path
import mlx.core as mx
from mlxkv import console
from mlxkv.metal import trust
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup hands on that it is ignored
console.cache_dir = lambda: Path(sys.argv[1])
layout, tasks = sys.argv[2], int(sys.argv[3])
if tasks:
    for i in range(tasks):
        trust.note(f"{layout} {i}", 64, mx.float16, True)
    sys.exit()
with trust.trial(layout, 64, mx.float16):
    print("trying", flush=True)
    time.sleep(3600)
"""


def started(folder, layout: str, tasks: int = 0) -> subprocess.Popen:
    """A process that tries kernels until it is ended, or that notes the outcome of `tasks`."""
    line = [sys.executable, "-c", TRIES, str(folder), layout, str(tasks)]
    return subprocess.Popen(line, stdout=subprocess.PIPE)


@pytest.mark.parametrize("by", (signal.SIGHUP, signal.SIGKILL))
def test_the_second_death_in_a_row_counts(folder, by):
    """A terminal that is closed while kernels are tried says nothing against them."""

    def dies() -> None:
        with started(folder, "x") as process:
            assert process.stdout.readline() == b"trying\n"
            process.send_signal(by)
        trust.forget()

    asked = "x", 64, mx.float16
    dies()
    assert trust.state(*asked) is None and trust.why_not(*asked) is None
    trust.note(*asked, True)  # it was tried again, and all was well
    dies()
    assert trust.state(*asked) is None
    dies()
    assert trust.state(*asked) == trust.DIED and "2 in a row" in trust.why_not(*asked)
    with trust.trial(*asked):  # as doctor --all does
        assert trust.state(*asked) is None
    assert trust.state(*asked) is None


def test_no_note_is_lost_between_processes(folder):
    many, count = 4, 12
    for process in [started(folder, f"x{i}", count) for i in range(many)]:
        with process:
            assert process.wait(PATIENCE) == 0
    trust.forget()
    for i in range(many):
        for j in range(count):
            assert trust.state(f"x{i} {j}", 64, mx.float16) == trust.PASSED


def test_an_old_mark_is_a_death(subtests, folder):
    """Another process may have its number by now; and a clock may jump."""
    for age in (601, -601, 1e300, float("nan")):
        with subtests.test(age=age):
            mark(os.getppid(), deaths=0, age=age)
            assert trust.state(*place(INT4)) is None
            mark(os.getppid(), deaths=1, age=age)
            assert trust.state(*place(INT4)) == trust.DIED
