"""Searched clips: what the search finds, how the file keeps them, and caches that use them."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from calibration_inputs import TEXT, data
from methods import config_named
from mlx_lm.models.cache import make_prompt_cache
from random_models import random_model

from mlxkv.cache.attention import attend
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.view import View
from mlxkv.calibration import clips
from mlxkv.calibration.clips import Trial
from mlxkv.codec.maps import LayerMaps, sample
from mlxkv.codec.transform import Transform
from mlxkv.errors import MachineError, UserError
from mlxkv.formats.calibration import artifact
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.presets import FULL, PRESETS
from mlxkv.loading.attach import attach, detach
from mlxkv.patching.observers import AttentionCall, PlainObserver

INT2 = PRESETS["oscar-int2"]
SMALL = dataclasses.replace(INT2, sink=16, recent=16, page=16)


def judged(keys, values, queries, config, rotations, softcap=None):
    """The trial of one call of attention over [1, G, T, D]."""
    trial, ear = Trial(), PlainObserver()
    ear.update_and_fetch(mx.array(keys), mx.array(values))
    view, _ = ear.keys_and_values()
    q, scale = mx.array(queries), keys.shape[-1] ** -0.5
    out = attend(q, view, scale, mask="causal", softcap=softcap)
    call = AttentionCall(ear.exact, q, scale, "causal", None, out, softcap)
    clips._judge(trial, call, lambda out: out, config, rotations, clips.CANDIDATES)
    return trial


def identity_maps(dims):
    eye = Transform(mx.eye(dims), mx.eye(dims))
    return LayerMaps(eye, eye)


def test_outliers_that_nobody_reads_want_a_clip_and_even_data_none():
    """Two dims of every token stick out by far; queries and outputs hold nothing there."""
    rng = np.random.default_rng(0)
    keys, values, q = (data(1, 1, 256, 64, seed=s) for s in range(3))
    keys[..., :2] = values[..., :2] = 60 * rng.choice([-1, 1], (1, 1, 256, 2))
    q[..., :2] = 0
    planted = judged(keys, values, 2 * q[:, :, :8], SMALL, identity_maps(64))
    errors = planted.errors("keys")
    assert planted.best("keys") < 0.97  # two of 64 are cut from .97 on
    assert errors[planted.best("keys")] < errors[1.0] / 5
    even = [rng.choice([-1.0, -1 / 3, 1 / 3, 1.0], (1, 1, 256, 64)) for _ in range(2)]
    fair = judged(*(x.astype(np.float32) for x in even), q[:, :, :8], SMALL, identity_maps(64))
    assert fair.best("keys") == fair.best("values") == 1.0


def test_what_is_judged_is_what_the_cache_gives(subtests):
    """One query behind the whole text: the error of a real cache with one side stored."""
    for side in (0, 1):
        for tokens, softcap in ((145, None), (150, None), (161, 0.5)):
            with subtests.test(side=side, tokens=tokens):
                keys, values = data(1, 2, tokens, 64), data(1, 2, tokens, 64, seed=1)
                q = data(1, 4, 1, 64, seed=2)
                layer_maps = sample(2, (64, 64))
                trial = judged(keys, values, q, SMALL, layer_maps, softcap)
                for clip, error in trial.errors(artifact.SIDES[side]).items():
                    sides = [FULL, FULL]
                    sides[side] = (SMALL.keys, SMALL.values)[side].clipped(clip)
                    cached = CompressedKVCache(
                        CacheConfig(*sides, sink=16, recent=16, page=16), layer_maps
                    )
                    for part in (slice(0, tokens - 1), slice(tokens - 1, tokens)):
                        pair = (mx.array(x[:, :, part]) for x in (keys, values))
                        view, _ = cached.update_and_fetch(*pair)
                    exact = View((mx.array(keys), mx.array(values)))
                    plain, out = (
                        attend(mx.array(q), x, 1 / 8, softcap=softcap) for x in (exact, view)
                    )
                    lost = out - plain
                    wanted = ((lost**2).sum() / (plain**2).sum()).item()
                    assert error == pytest.approx(wanted, rel=2e-3)


@pytest.fixture(scope="module")
def searched(model, made):
    return clips.search(model, made, INT2, TEXT)[0]


def test_one_pass_of_attach_gives_each_layer_its_own(model, searched):
    layers = {
        name: dataclasses.replace(layer, keys=dataclasses.replace(layer.keys, clips=own))
        for (name, layer), own in zip(
            searched.layers.items(), ({"int2 g64": 0.8}, {"int2 g64": 0.7}), strict=True
        )
    }
    made = dataclasses.replace(searched, layers=layers)
    values = [layer.values.clips["int2 g64"] for layer in layers.values()]

    def used(kv):
        reports = attach(model, config_named(kv), calibration=made)
        caches = make_prompt_cache(model)
        detach(model)
        pairs = [(c.config.keys.quantizer.clip, c.config.values.quantizer.clip) for c in caches]
        return pairs, [r.clips for r in reports]

    wanted = list(zip((0.8, 0.7), values, strict=True))
    assert used("oscar-int2") == (wanted, wanted)
    assert used("oscar-int2+g64") == (wanted, wanted)  # the same format, for heads of 64
    assert used("oscar-int2+g32") == ([(0.96, 0.92)] * 2, [None] * 2)  # not searched
    assert used("oscar-int3") == ([(1.0, 1.0)] * 2, [None] * 2)
    assert used("oscar-int2+clip.92") == ([(0.92, 0.92)] * 2, [None] * 2)  # keeps its own
    pairs, _ = used("oscar-int2/oscar-int4")
    assert pairs == [(0.8, 1.0), (0.7, 1.0)]
    reports = attach(model, "oscar-int2/fp16", calibration=made)
    detach(model)
    assert [r.clips for r in reports] == [(0.8, 1.0), (0.7, 1.0)]


def test_presets_without_clips_to_search(subtests, model, searched):
    for name in ("int4", "fp16", "oscar-int2+clip.92", "balanced-int2/fill-3"):
        with subtests.test(name=name):
            mixed_bits = "fill" in name
            if not mixed_bits:
                assert "choose from int3, int2, srft-scaled-int8" in clips.why_not(
                    config_named(name)
                )
            reason = "not searched beside mixed bits" if mixed_bits else "searched for calibrated"
            with pytest.raises(UserError, match=rf"\[search-clip\] clips are {reason}"):
                clips.search(model, searched, config_named(name), TEXT)


def test_too_little_text_and_nan_are_one_line(model, searched):
    with pytest.raises(UserError, match=r"got 350 tokens; this preset keeps 384 exact"):
        clips.search(model, searched, INT2, TEXT, window=350)
    other = random_model("llama")
    weight = other.model.layers[1].self_attn.k_proj
    weight.weight = weight.weight.at[0, 0].add(float("nan"))
    with pytest.raises(MachineError, match=r"\[search-clip\] NaN or infinity .* layer 1"):
        clips.search(other, searched, INT2, TEXT, candidates=(1.0,))


def test_the_command(model_folder, tmp_path, capsys, monkeypatch):
    from mlxkv.cli import main

    monkeypatch.setattr(artifact.console, "cache_dir", lambda: tmp_path / "cache")
    text, out = tmp_path / "a.txt", tmp_path / "b.safetensors"
    text.write_text("Some words about nothing in particular. " * 40)
    args = ["calibrate", "--model", str(model_folder), "--text", str(text), "--tokens", "600"]
    args += ["-o", str(out)]
    assert main([*args, "--search-clip"]) == 0
    assert "oscar-int2: clips" in capsys.readouterr().out
    first = artifact.read_calibration(out)
    assert set(first.layers["0"].keys.clips) == {"int2 g64"}
    # Another format later, with the same rotations: what was found before stays.
    assert main([*args, "--search-clip", "--kv", "oscar-int3", "--calibration", str(out)]) == 0
    assert "oscar-int3: clips" in capsys.readouterr().out
    both = artifact.read_calibration(out)
    assert both.digest == first.digest
    assert set(both.layers["0"].values.clips) == {"int2 g64", "int3 g64"}
    for more, message in (
        (["--kv", "oscar-int2"], "[--kv] is for --search-clip"),
        (["--calibration", str(out)], "[--calibration] is for --search-clip"),
        (["--search-clip", "--kv", "int4"], "got int4; clips are searched for calibrated"),
        (["--search-clip", "--kv", "oscar-int9"], "unknown preset"),
        (["--search-clip", "--calibration", str(text)], "no safetensors file"),
    ):
        assert main([*args, *more]) == 2
        assert message in capsys.readouterr().err
