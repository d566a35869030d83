"""LoRA adapters beside the weights of a folder, as mlx-lm's `load(adapter_path=)` takes them."""

# ruff: noqa: F401, F811 (the fixtures `saved` and `folder` are imported)
import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from adapters import LORA, write_adapter
from random_models import config_of, error_of, folder, random_model, save, saved, tokens
from small_models import TINY

from mlxkv.calibration import measure
from mlxkv.catalog.folder import ADAPTER, ADAPTER_CONFIG, check_folder, fingerprint
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact
from mlxkv.loading.attach import detach
from mlxkv.loading.load import load
from mlxkv.patching.mark import origin_of
from mlxkv.patching.patch import patched
from mlxkv.patching.projections import sensitivities


@pytest.fixture
def adapter(tmp_path) -> Path:
    return write_adapter(tmp_path / "adapter", random_model("llama"))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_logits_are_those_of_mlx_lm(folder, tmp_path, kind):
    adapter = write_adapter(tmp_path / "its", random_model("llama"), kind)
    loaded = load(str(folder), "fp16", adapter_path=adapter)
    theirs, _ = mlx_lm.load(str(folder), adapter_path=str(adapter))
    plain = load(str(folder), "fp16")
    text = tokens(12)[None]
    found, want, without = (np.array(m(text)) for m in (loaded.model, theirs, plain.model))
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)
    assert np.abs(found - without).max() > 0.1
    assert loaded.notes[-1] == "adapter its" and loaded.path == folder
    assert loaded.fingerprint != plain.fingerprint == fingerprint(check_folder(folder))


def test_every_number_of_an_adapter_counts_for_the_identity(folder, adapter, tmp_path):
    marks = [fingerprint(check_folder(folder)), fingerprint(check_folder(folder, adapter))]
    other = write_adapter(tmp_path / "other", random_model("llama"), seed=6)
    marks.append(fingerprint(check_folder(folder, other)))
    shutil.copyfile(adapter / ADAPTER, other / ADAPTER)
    assert fingerprint(check_folder(folder, other)) == marks[1]  # wherever it lies
    config = json.loads((other / ADAPTER_CONFIG).read_text())
    config["lora_parameters"]["scale"] = 20.0
    (other / ADAPTER_CONFIG).write_text(json.dumps(config))
    marks.append(fingerprint(check_folder(folder, other)))
    assert len({*marks}) == 4


def test_a_calibration_of_the_base_model_is_not_used(tmp_path, monkeypatch):
    """TINY comes with one, which is passed over; an adapter may come with its own."""
    monkeypatch.setattr(artifact.console, "cache_dir", lambda: tmp_path)
    calls = []

    def calibrate(model, origin):
        calls.append(origin)
        return measure.calibrate(model, [3 + i % 190 for i in range(600)], text="test", window=512)

    monkeypatch.setattr(measure, "from_corpus", calibrate)
    adapter = write_adapter(tmp_path / "adapter", load(TINY, "fp16").model)
    load(TINY, "int3")
    assert not calls
    loaded = load(TINY, "int3", adapter_path=adapter)
    assert len(calls) == 1 and calls[0].fingerprint == loaded.fingerprint
    kept = artifact.kept_path(loaded.fingerprint)
    load(TINY, "int3", adapter_path=adapter)
    assert len(calls) == 1 and kept.exists()  # kept, and found
    kept.rename(adapter / f"{artifact.NAME}.safetensors")
    again = load(TINY, "int3", adapter_path=adapter)
    assert len(calls) == 1 and origin_of(again.model).folder == adapter
    with pytest.raises(UserError, match="belongs to another model"):
        load(TINY, "int3", adapter_path=adapter, calibration=artifact.find("", Path(TINY)))


def test_sensitivities_are_of_the_map_with_its_adapter(folder, adapter):
    """M_o of W + scale (A B)^T, not of W alone."""
    model = load(str(folder), "fp16", adapter_path=adapter).model
    detach(model)
    with patched(model):
        found = sensitivities(model, [(0,)])[(0,)]
    target = model.layers[0].self_attn.o_proj
    whole = (
        np.array(target.linear.weight, np.float64)
        + LORA["scale"]
        * (np.array(target.lora_a, np.float64) @ np.array(target.lora_b, np.float64)).T
    )
    groups, dims = found.shape[0], found.shape[-1]
    rows = whole.T.reshape(groups, -1, dims, whole.shape[0])
    np.testing.assert_allclose(found, (rows @ rows.swapaxes(-1, -2)).sum(1), rtol=1e-4, atol=1e-5)


def test_what_is_no_adapter_is_refused_in_one_line(folder, adapter, tmp_path):
    nothing = error_of(folder, adapter_path=tmp_path / "nothing")
    assert nothing.startswith("[--adapter-path] adapter_config.json is missing")
    (adapter / ADAPTER).rename(adapter / "adapter_model.safetensors")
    assert "got adapter_model.safetensors, of PEFT, in" in error_of(folder, adapter_path=adapter)
    wide = random_model("llama", hidden_size=128)
    other = write_adapter(tmp_path / "wide", wide)
    assert "does not fit the model (ValueError" in error_of(folder, adapter_path=other)
    (other / ADAPTER).write_bytes(b"cut")
    assert "adapters.safetensors" in error_of(folder, adapter_path=other)
    (file := tmp_path / "x.gguf").write_bytes(b"GGUF and no more")
    refused = error_of(file, adapter_path=other)
    assert refused.startswith("[--adapter-path] adapters are for folders in the hub's format")
