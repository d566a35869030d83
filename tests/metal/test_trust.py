"""What a Mac's kernels are known for: one note for each format, and a mark while a process tries one."""

import os
import signal
import subprocess
import sys

import mlx.core as mx
import pytest
from on_emulator import counting, unbuildable
from patience import PATIENCE

from mlxkv.cache import choose, selftest
from mlxkv.formats.presets import PRESETS
from mlxkv.formats.records import record_layout
from mlxkv.metal import launch, trust

INT4, INT8 = PRESETS["srft-int4+g64"], PRESETS["int8"]
DIMS = (64, 64)


def kernels(config, name: str = trust.TILES, dims: int = 64, dtype=mx.float16) -> trust.Kernels:
    return record_layout(config, *config.dims(*DIMS)), dims, dtype, name


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setattr("mlxkv.console.cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def mac(folder, monkeypatch):
    """Makes a factory that of Metal."""

    def be(factory):
        monkeypatch.setattr(mx.fast, "metal_kernel", factory)
        monkeypatch.setattr(selftest, "_results", {})
        return launch.using(factory)

    return be


def gone() -> int:
    """The number of a process that has ended."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def mark(process: int, monkeypatch, name: str = trust.TILES, times: int = 2) -> None:
    """What a process leaves that is trying them, so many times."""
    with monkeypatch.context() as patch:
        patch.setattr(trust.os, "getpid", lambda: process)
        for _ in range(times):
            trust._write(trust.TRYING, kernels(INT4, name))


def test_a_format_that_fails_distrusts_itself_alone(folder):
    assert trust.why_not(kernels(INT4)) is None  # not tried yet: it may be
    trust.note(kernels(INT4), None)
    trust.note(kernels(INT8), "attend is\noff by 3")
    assert trust.why_not(kernels(INT4)) is None
    why = trust.why_not(kernels(INT8))
    assert "attend is off by 3" in why and "mlxkv doctor" in why and "\n" not in why
    for other in ({"dims": 128}, {"dtype": mx.bfloat16}, {"name": "kernels"}):
        assert trust.why_not(kernels(INT8, **other)) is None
    trust.note(kernels(INT8), None)
    assert trust.why_not(kernels(INT8)) is None
    file = folder / "kernels.txt"
    assert file.stat().st_mode & 0o777 == 0o600 and os.listdir(folder) == ["kernels.txt"]


def test_other_files_are_no_notes(subtests, folder):
    folder.mkdir()
    for text in ("\n", "[]", "\xff", "trying", "failed x", "trying 1 2 3", "x" * (2 << 20)):
        with subtests.test(text=text[:40]):
            (folder / "kernels.txt").write_text(text + "\n", encoding="latin-1")
            assert trust.why_not(kernels(INT4)) is None
            trust.note(kernels(INT4), "x")
            assert trust.why_not(kernels(INT4)) is not None


def test_notes_hold_for_one_gpu_system_version_and_text(subtests, folder, monkeypatch):
    trust.note(kernels(INT4), "x")
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
            assert trust.why_not(kernels(INT4)) is None
    trust._machine.cache_clear()
    assert trust.why_not(kernels(INT4)) is not None


def test_a_folder_that_cannot_be_written_is_no_fault(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("mlxkv.console.cache_dir", lambda: tmp_path / "file" / "cache")
    with trust.trial(kernels(INT4)):
        pass
    trust.note(kernels(INT4), "x")
    assert trust.why_not(kernels(INT4)) is None


def test_a_line_is_there_while_a_kernel_is_tried(folder):
    def read() -> list[list[str]]:
        return [line.split()[:2] for line in (folder / "kernels.txt").read_text().splitlines()]

    with pytest.raises(KeyboardInterrupt), trust.trial(kernels(INT4)):
        assert read() == [["trying", str(os.getpid())]]
        assert trust.why_not(kernels(INT4)) is None
        raise KeyboardInterrupt
    assert read()[-1] == ["stopped", str(os.getpid())]


def test_what_processes_died_of_is_not_tried_again(mac, monkeypatch):
    built = []
    with mac(counting(built, tiles=True)):
        mark(gone(), monkeypatch, trust.ROWS)
        assert trust.ended_processes(kernels(INT4, trust.ROWS))
        assert choose.plan(INT4, DIMS, mx.float16).label == "tile kernels"
        del built[:]
        mark(gone(), monkeypatch)
        found = choose.plan(INT4, DIMS, mx.float16)
        assert found.label == "kernels"
        assert "processes ended while they tried these tiles, 2 in a row" in found.reason
        assert built and not any("tile" in name for name in built)
        mark(gone(), monkeypatch, "kernels")
        why = choose.plan(INT4, DIMS, mx.float16).reason
        assert why.startswith(choose.FAILED) and "mlxkv doctor --all" in why


def test_what_another_process_tries_is_tried_here_too(mac, monkeypatch):
    with mac(counting([], tiles=True)):
        mark(gone(), monkeypatch, trust.ROWS, times=1)
        mark(os.getppid(), monkeypatch, trust.ROWS, times=1)
        assert choose.plan(INT4, DIMS, mx.float16).label == "kernels by rows"
        mark(gone(), monkeypatch, trust.ROWS, times=1)  # the first behind one that passed
        assert not trust.ended_processes(kernels(INT4, trust.ROWS))


def test_a_mac_tries_kernels_as_a_model_is_loaded(mac):
    """Nobody has to run doctor first; what failed once is not built again."""
    built = []
    with mac(counting(built, tiles=True)):
        assert choose.plan(INT4, DIMS, mx.float16).label == "kernels by rows"
        for body in ("attend_tile", "merge"):  # 4 rows, and 8
            assert any(body in name for name in built)
    with mac(counting(built := [], tiles=True)):
        shape = selftest.AttentionShape(16, 2)
        assert choose.plan(INT4, DIMS, mx.float16, shape).label == "kernels by rows"
        assert built and not any("merge" in name for name in built)  # which 8 rows do not run
    with mac(unbuildable("merge", tiles=True)):
        assert choose.plan(INT4, DIMS, mx.float16).label == "tile kernels"
        assert trust.why_not(kernels(INT4, trust.ROWS)) is not None
    with mac(counting(built := [], tiles=True)):
        assert choose.plan(INT4, DIMS, mx.float16).label == "tile kernels"
        assert not any("merge" in name for name in built)
        codebooks = PRESETS["turbo-int3"]  # codes are decoded first
        assert choose.plan(codebooks, DIMS, mx.float16).label == "tile kernels"
    with mac(unbuildable("attend_tile", tiles=True)):
        assert choose.plan(INT4, DIMS, mx.float16).label == "kernels"
        assert "program_source:1312:5: error" in trust.why_not(kernels(INT4))
    with mac(counting(built := [], tiles=True)):
        assert choose.plan(INT4, DIMS, mx.float16).label == "kernels"
        assert not any("tile" in name for name in built)
        assert choose.plan(INT8, DIMS, mx.float16).label == "kernels by rows"


def test_the_file_stays_small(folder, monkeypatch):
    monkeypatch.setattr(trust, "LONGEST", 2000)
    for _ in range(30):
        trust.note(kernels(INT4), "x" * 100)
    assert (folder / "kernels.txt").stat().st_size < 2000


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
        trust.note((f"{layout} {i}", 64, mx.float16, trust.TILES), "x")
    sys.exit()
with trust.trial((layout, 64, mx.float16, trust.TILES)):
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
            assert not trust.ended_processes(asked)
            process.send_signal(by)

    asked = "x", 64, mx.float16, trust.TILES
    dies()
    assert trust.why_not(asked) is None
    trust.note(asked, None)  # it was tried again, and all was well
    dies()
    assert trust.why_not(asked) is None
    dies()
    assert trust.ended_processes(asked) and "2 in a row" in trust.why_not(asked)
    with trust.trial(asked):  # as doctor --all does
        pass
    assert not trust.ended_processes(asked)


def test_no_note_is_lost_between_processes(folder):
    many, count = 4, 12
    for process in [started(folder, f"x{i}", count) for i in range(many)]:
        with process:
            assert process.wait(PATIENCE) == 0
    for i in range(many):
        for j in range(count):
            assert trust.why_not((f"x{i} {j}", 64, mx.float16, trust.TILES)) is not None
