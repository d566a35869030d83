"""What attach, load and a cache take of a calibration, and what they refuse."""

import dataclasses

import mlx.core as mx
import pytest
from methods import config_named
from mlx_lm.models.cache import make_prompt_cache
from random_models import random_model

from mlxkv.cache.adaptive import AdaptiveKVCache
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.calibration import measure
from mlxkv.codec import maps
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact
from mlxkv.formats.presets import PRESETS
from mlxkv.loading.attach import attach, detach
from mlxkv.loading.load import load

OSCAR = config_named("oscar-int2+g32")


def test_kv_heads_that_were_spread_over_processes(subtests):
    """`model.shard` leaves each process its own heads, and the maps of all."""
    for preset in ["oscar-int4", "int2", "oja-0.75"]:
        with subtests.test(preset=preset):
            config = PRESETS[preset]
            kind = AdaptiveKVCache if config.needs_queries else CompressedKVCache
            cache = kind(config, maps.sample(2, (64, 64), config.fitted))
            for new in (1, 300):
                with pytest.raises(UserError, match=r"\[attach\] .* 2 kv heads; got 1"):
                    cache.update_and_fetch(*[mx.zeros((1, 1, new, 64))] * 2)
            cache.update_and_fetch(*[mx.zeros((1, 2, 300, 64))] * 2)


def test_a_calibrated_preset_needs_a_calibration(model, made, tmp_path):
    with pytest.raises(UserError, match=r"\[attach\] oscar-int2 needs a calibration; got a model"):
        attach(model, "oscar-int2")
    with pytest.raises(UserError, match="needs the rotations of a calibration"):
        CompressedKVCache(OSCAR)
    assert not hasattr(model, "_mlxkv_attachment")
    path = tmp_path / "a.safetensors"
    artifact.write_calibration(path, made)
    for kv in ("oscar-int2", "oscar-int3/int4", "int4/oscar-int2"):
        assert all(report.compressed for report in attach(model, kv, calibration=path))
    with pytest.raises(UserError, match="another shape in layer 0; got 2 kv heads of 64"):
        attach(random_model("llama", num_key_value_heads=1), "oscar-int2", calibration=path)
    cache = make_prompt_cache(model)[0]  # what was attached before stays
    assert cache.config.values.calibrated and not cache.config.keys.calibrated
    detach(model)


def test_on_the_spot_once(model_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(artifact.console, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(measure, "TOKENS", 600)
    loaded = load(str(model_folder), "oscar-int2")
    said = capsys.readouterr().err
    assert "no calibration of" in said and "calibrated on 600 tokens, kept in" in said
    path = artifact.kept_path(loaded.fingerprint)
    assert artifact.read_calibration(path).text == "corpus calibration"
    before = path.stat().st_mtime_ns
    load(str(model_folder), "oscar-int3")
    assert capsys.readouterr().err == ""
    assert path.stat().st_mtime_ns == before


def test_load_refuses_the_calibration_of_another_model(model_folder, made, tmp_path):
    path = tmp_path / "a.safetensors"
    artifact.write_calibration(path, dataclasses.replace(made, fingerprint="0" * 16))
    with pytest.raises(UserError, match=r"\[calibration\] .* belongs to another model"):
        load(str(model_folder), "oscar-int2", calibration=path)
    with pytest.raises(UserError, match="is not there"):
        load(str(model_folder), "oscar-int2", calibration=tmp_path / "b")


class _Group:
    """As mx.distributed has it."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = lambda: rank, lambda: size


def test_maps_are_cut_to_the_heads_of_a_process():
    model = random_model("qwen3")
    made = measure.random(model)
    whole = next(iter(maps.of(made).values()))
    heads = whole.keys.down.shape[0]
    parts = [maps.cut(whole, rank, heads) for rank in range(heads)]
    assert all(part.keys.down.shape[0] == part.values.up.shape[0] == 1 for part in parts)
    joined = mx.concatenate([part.keys.down for part in parts])
    assert mx.array_equal(joined, whole.keys.down)
    # A cache that one process has saved is not for another, nor for the whole model.
    assert len({whole.digest, *(part.digest for part in parts)}) == 1 + heads
    assert maps.cut(whole, 0, heads) is parts[0]
    with pytest.raises(UserError, match="cannot be shared by 5 processes"):
        attach(model, "oscar-int2", calibration=made, group=_Group(0, 5))
    with pytest.raises(UserError, match=r"\[fold\]"):
        attach(model, "oscar-int2", calibration=made, fold=True, group=_Group(0, 2))
    assert "make_cache" not in vars(model)  # nothing was attached
