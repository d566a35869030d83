"""The calibration beside a model is the one that is used."""

from pathlib import Path

from small_models import TINY

from mlxkv.formats.calibration import artifact
from mlxkv.loading.attach import attach, detach
from mlxkv.loading.load import load


def test_nothing_is_made_where_a_file_lies_beside_the_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(artifact.console, "cache_dir", lambda: tmp_path)
    loaded = load(TINY, "oscar-int2")
    assert capsys.readouterr().err == "" and not list(tmp_path.iterdir())  # nothing was made anew
    made = artifact.find(loaded.fingerprint, loaded.path)
    assert made.fingerprint == loaded.fingerprint and Path(made.model).name == "tiny"
    assert made.tokens == 1024 and made.positions == 8192
    assert Path(made.path).stat().st_size < 3_000_000
    assert all(r.compressed for r in loaded.layers if r.grows)
    attach(loaded.model, "balanced-int2")
    attach(loaded.model, "srft-scaled-int4")
    attach(loaded.model, "centred-int2")
    detach(loaded.model)
    assert capsys.readouterr().err == "" and not list(tmp_path.iterdir())
