"""A calibration that Ctrl-C breaks off goes on where it was, and comes to the same numbers."""

import json

import pytest

from mlxkv.calibration import measure
from mlxkv.calibration.begun import Begun
from mlxkv.formats.calibration import artifact
from mlxkv.loading.load import load
from mlxkv.untrusted import safetensors


@pytest.fixture
def reading(tmp_path, monkeypatch):
    """Five windows of 220 tokens in two parts each. Returns the tokens that were read, and the part to stop in."""
    monkeypatch.setattr(artifact.console, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(measure, "TOKENS", 1100)
    monkeypatch.setattr(measure, "WINDOW", 220)
    monkeypatch.setattr(measure, "CHUNK", 110)
    read, stops, whole = [], set(), measure.read

    def interrupted(model, caches, tokens, first, progress=None):
        def count(n):
            read.append(n)
            if len(read) in stops:
                raise KeyboardInterrupt
            progress(n)

        whole(model, caches, tokens, first, count)

    monkeypatch.setattr(measure, "read", interrupted)
    return read, stops


def test_ctrl_c_loses_no_whole_window(model_folder, reading, tmp_path, capsys):
    read, stops = reading
    path = tmp_path / "calibration"
    load(str(model_folder), "fill-3")
    (made,) = path.glob("*.safetensors")
    expected = artifact.read_calibration(made).digest
    made.unlink()
    read.clear()
    capsys.readouterr()
    for at, going_on in ((6, ""), (2, "84% was kept"), (3, "84% was kept")):
        stops.add(at)
        with pytest.raises(KeyboardInterrupt):
            load(str(model_folder), "fill-3")
        said = capsys.readouterr().err
        assert "Ctrl-C keeps what is measured, and --kv int4 starts at once" in said
        assert "[calibrate] stopped; what is measured is kept, and the next goes on there" in said
        assert going_on in said and ("was kept" in said) == bool(going_on)
        (begun,) = path.iterdir()
        assert begun.suffix == ".begun" and begun.stat().st_mode & 0o077 == 0
        stops.clear()
        read.clear()
    load(str(model_folder), "fill-3")
    assert "89% was kept" in capsys.readouterr().err and sum(read) == 440
    (made,) = path.iterdir()
    assert artifact.read_calibration(made).digest == expected


def test_what_is_not_whole_or_of_another_text_is_begun_anew(model_folder, reading, tmp_path):
    read, stops = reading
    stops.add(3)
    with pytest.raises(KeyboardInterrupt):
        load(str(model_folder), "fill-3")
    (path,) = (tmp_path / "calibration").iterdir()
    whole = path.read_bytes()
    of = json.loads(safetensors(path).metadata["begun"])
    assert of.pop("windows") == 1 and Begun.read(path, of).windows == 1
    assert not Begun.read(path, of | {"text": "other"}).sums
    for data in (
        whole[:-1],
        whole[: len(whole) // 2],
        b"",
        whole.replace(b"windows", b"window_", 1),
    ):
        path.write_bytes(data)
        assert not Begun.read(path, of).sums
    path.unlink()
    assert Begun.read(path, of) == Begun(path, of)


def test_nothing_is_kept_before_the_gradients(model_folder, reading, tmp_path, monkeypatch, capsys):
    def fisher(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "fisher", fisher)
    with pytest.raises(KeyboardInterrupt):
        load(str(model_folder), "fill-3")
    assert "is kept" not in capsys.readouterr().err
    assert not list(tmp_path.glob("calibration/*"))
