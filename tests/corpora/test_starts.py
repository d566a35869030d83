"""What a tokenizer puts before every text stands before each text that is calibrated on or measured."""

import sys

import pytest
from small_models import TINY

import cuda_track.calibrate as cuda_calibrate
from mlxkv import load
from mlxkv.calibrate import run
from mlxkv.calibration import measure
from mlxkv.calibration.begun import Begun
from mlxkv.corpora import sources
from mlxkv.loading import agreement, quality_check

START = [5, 6]


class Stop(Exception):
    """What was to be seen is seen."""


@pytest.fixture(autouse=True)
def start(monkeypatch):
    for module in (sources, measure, run):
        monkeypatch.setattr(module, "start_of", lambda loaded: START)


@pytest.fixture
def seen(monkeypatch):
    """A function that replaces another one by one that keeps how it is called, and stops."""

    def replaced(module, name):
        calls = []

        def kept(*args, **options):
            calls.append((args, options))
            raise Stop

        monkeypatch.setattr(module, name, kept)
        return calls

    return replaced


def test_calibrations(model_folder, seen, monkeypatch, tmp_path):
    loaded, asked = load(str(model_folder), "fp16"), {}
    monkeypatch.setattr(Begun, "read", lambda path, of: asked.update(of) or pytest.fail("kept"))
    with pytest.raises(pytest.fail.Exception):
        measure.on_text(loaded.model, loaded, sources.Text("x", [7] * 600), kept=tmp_path / "x")
    assert asked["start"] == START, "what another start has read does not count"
    calls = seen(measure, "calibrate")
    with pytest.raises(Stop):
        measure.on_text(loaded.model, loaded, sources.Text("x", [7] * 600))
    assert calls[0][1]["start"] == START


def test_clips(model_folder, seen, tmp_path):
    calls = seen(run.clips, "search")
    options = run.CalibrateOptions(
        model=str(model_folder),
        tokens=600,
        out=str(tmp_path / "x.safetensors"),
        search_clip=True,
        kv="oscar-int2",
    )
    with pytest.raises(Stop):
        run.run_fitting(options)
    assert calls[0][1]["start"] == START


def test_shares_and_the_check_of_a_preset(model_folder, monkeypatch):
    loaded = load(str(model_folder), "fp16")
    texts = agreement.texts_of(loaded, 40, 2)
    assert len(texts) == 2 and all(text[:3] != START and text[:2] == START for text in texts)
    read = []
    monkeypatch.setattr(quality_check, "_log_probabilities", lambda *x: read.append(x[2]) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quality_check.divergence(loaded)
    assert read[0][:2] == START and len(read[0]) == min(loaded.context, quality_check.TOKENS)


def test_torch(seen, monkeypatch, tmp_path):
    calls = seen(cuda_calibrate, "calibrate")
    monkeypatch.setattr(
        sys, "argv", ["x", "--model", str(TINY), "-o", str(tmp_path / "x"), "--device", "cpu"]
    )
    with pytest.raises(Stop):
        cuda_calibrate.main()
    assert calls[0][0][-1] == START
