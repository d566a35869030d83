"""What a Mac's kernels are known for: one note for each format, and a mark while a process tries one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import mlx.core as mx
import pytest
from faulty import counting, unbuildable

from mlxkv import kernels, sealed, selftest, tiles, trust
from mlxkv.metal import launch
from mlxkv.presets import PRESETS

INT4, INT8 = PRESETS["srft-int4+g64"], PRESETS["int8"]
DIMS = (64, 64)


def place(config, tiled: bool = True) -> tuple:
    return kernels.record_layout(config, *config.dims(*DIMS)), 64, mx.float16, tiled


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
        monkeypatch.setattr(selftest, "_found", {})
        trust.forget()
        return launch.using(factory)

    return be


def gone() -> int:
    """The number of a process that has ended."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def mark(process: int, config=INT4, tiled: bool = True) -> None:
    trust._write(trust._key(*place(config, tiled)), {"state": "trying", "process": process})
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
    assert file.stat().st_mode & 0o777 == 0o600 and os.listdir(folder) == ["kernels.json"]


def test_portable_kernels_that_failed_are_tried_at_every_start(folder):
    trust.note(*place(INT4, False)[:3], False, tiled=False, reason="x")
    assert trust.state(*place(INT4, False)) == trust.FAILED
    assert trust.why_not(*place(INT4, False)) is None


@pytest.mark.parametrize(
    "text",
    [
        *(
            "{",
            "[]",
            '"x"',
            "null",
            "\xff",
            "[" * 100_000,
            '{"rows": 3}',
            '{"here": {}, "rows": []}',
        ),
        '{"device": "Apple M1", "mlx": "0.31.0", "text": "0"}',  # as it was once
    ],
)
def test_other_files_are_no_notes(folder, text):
    folder.mkdir()
    (folder / "kernels.json").write_text(text, encoding="latin-1")
    assert trust.state(*place(INT4)) is None
    trust.note(*place(INT4)[:3], True)
    trust.forget()
    assert trust.state(*place(INT4)) == trust.PASSED


@pytest.mark.parametrize("name", ("device", "system", "mlx", "mlxkv", "text"))
def test_notes_hold_for_one_gpu_compiler_and_text(folder, monkeypatch, name):
    trust.note(*place(INT4)[:3], False, reason="x")
    here = trust._here() | {name: "another"}
    monkeypatch.setattr(trust, "_here", lambda: here)
    trust.forget()
    assert trust.state(*place(INT4)) is None


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
        assert "a process ended while it tried these tiles" in sealed.why_no_tiles(
            INT4, DIMS, mx.float16
        )
        assert sealed.decoder(INT4, DIMS, mx.float16) == "kernels"
        assert built and not any("tile" in name for name in built)
        mark(gone(), tiled=False)
        why = sealed.why_not(INT4, DIMS, mx.float16)
        assert why.startswith(sealed.FAILED) and "mlxkv doctor --all" in why


def test_what_another_process_tries_is_left_to_it(mac):
    built = []
    with mac(counting(built, tiles=True)):
        mark(os.getppid())
        assert trust.state(*place(INT4)) == trust.BUSY
        assert "another process" in tiles.why_not(*place(INT4)[:3], launch.factory())
        rows = trust._file()
        rows[trust._key(*place(INT4))] = {"state": trust.PASSED}  # as the other one writes it
        data = {"here": trust._here(), "rows": rows}
        trust._path().write_text(json.dumps(data))
        assert trust.state(*place(INT4)) == trust.PASSED
        assert tiles.why_not(*place(INT4)[:3], launch.factory()) is None


def test_a_mac_tries_tiles_as_a_model_is_loaded(mac):
    """Nobody has to run doctor first; what failed once is not built again."""
    built = []
    with mac(counting(built, tiles=True)):
        assert sealed.decoder(INT4, DIMS, mx.float16) == "tile kernels"
        assert not any("merge" in name for name in built)  # the portable body would be in vain
    assert trust.state(*place(INT4)) == trust.PASSED
    with mac(unbuildable("attend_tile", tiles=True)):
        assert sealed.decoder(INT4, DIMS, mx.float16) == "kernels"
        assert "program_source:1312:5: error" in trust.why_not(*place(INT4))
        assert trust.state(*place(INT4, False)) == trust.PASSED
    with mac(counting(built := [], tiles=True)):
        assert sealed.decoder(INT4, DIMS, mx.float16) == "kernels"
        assert not any("tile" in name for name in built)
        assert sealed.decoder(INT8, DIMS, mx.float16) == "tile kernels"
