"""A cache that changes what a model says is warned of when it is loaded, once measured for each model and format."""

import json

import pytest

from mlxkv.loading import quality_check
from mlxkv.loading.load import load


@pytest.fixture
def folder_of_results(tmp_path, monkeypatch):
    monkeypatch.setattr("mlxkv.console.cache_dir", lambda: tmp_path)
    monkeypatch.setattr(quality_check, "TOKENS", 320)
    return tmp_path / "quality"


@pytest.fixture
def steep(monkeypatch):
    """Logits that differ by much where attention does: random models are nearly indifferent otherwise."""

    def loaded(folder, kv: str):
        made = load(str(folder), kv)
        for layer in made.model.model.layers:
            for name in ("q_proj", "k_proj"):
                part = getattr(layer.self_attn, name)
                part.weight = part.weight * 6
        made.model.lm_head.weight = made.model.lm_head.weight * 20
        return made

    return loaded


def test_a_lossy_cache_is_warned_of_once_measured(model_folder, steep, folder_of_results, capsys):
    loaded = steep(model_folder, "naive-int2")
    quality_check.warn(loaded)
    said = capsys.readouterr().err
    assert "naive-int2 changes what" in said and "--kv int4" in said
    (file,) = folder_of_results.iterdir()
    kl = json.loads(file.read_text())["kl"]
    assert kl > quality_check.LIMIT and f"KL {kl:.2g}" in said
    file.write_text(json.dumps({"kl": 0.01}))
    quality_check.warn(loaded)  # what was kept is believed
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kept", ["{", '{"kl": "much"}'])
def test_a_broken_result_is_measured_again(model_folder, steep, folder_of_results, capsys, kept):
    loaded = steep(model_folder, "naive-int2")
    quality_check.warn(loaded)
    (file,) = folder_of_results.iterdir()
    file.write_text(kept)
    capsys.readouterr()
    quality_check.warn(loaded)
    assert "changes what" in capsys.readouterr().err and json.loads(file.read_text())["kl"] > 0


def test_a_faithful_cache_is_not(model_folder, steep, folder_of_results, capsys):
    quality_check.warn(steep(model_folder, "int8/int4"))
    said = capsys.readouterr().err
    assert said == "comparing int8/int4 with the full cache: once for a model\n"
    assert list(folder_of_results.iterdir())


@pytest.mark.parametrize("kv", quality_check.TRUSTED)
def test_trusted_presets_start_at_once(model_folder, folder_of_results, kv, monkeypatch):
    monkeypatch.setattr(quality_check, "divergence", None)
    quality_check.warn(load(str(model_folder), kv))
    assert not folder_of_results.exists()
