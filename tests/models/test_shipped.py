"""The calibration beside a model is the one that is used."""

from pathlib import Path

import pytest
from small_models import QWEN, TINY

from mlxkv.formats.calibration import artifact
from mlxkv.formats.saved.marks import same_model
from mlxkv.models import attach, detach, load


@pytest.mark.parametrize("name", (TINY, QWEN))
def test_nothing_is_made_where_a_file_lies_beside_the_weights(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(artifact.console, "cache_dir", lambda: tmp_path)
    loaded = load(name, "oscar-int2")
    assert capsys.readouterr().err == "" and not list(tmp_path.iterdir())  # nothing was made anew
    made = artifact.find(loaded.fingerprint, loaded.path)
    assert same_model(made.fingerprint, loaded.fingerprint) and made.model == Path(name).name
    assert (made.target, made.parts, made.per_layer) == ("attention", "uhp", False)
    assert made.text == "stories" and made.tokens == 8900
    assert Path(made.path).stat().st_size < 3_000_000
    assert all(r.compressed for r in loaded.layers if r.grows)
    assert made.balanced and made.scaled and made.centred
    attach(loaded.model, "balanced-int2")
    attach(loaded.model, "srft-scaled-int4")
    attach(loaded.model, "centred-int2")
    detach(loaded.model)
    assert capsys.readouterr().err == "" and not list(tmp_path.iterdir())
