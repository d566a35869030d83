"""A folder of a model with latents (MLA), random weights, in transformers and in MLX: logits, maps, sessions."""

import shutil
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
import transformers
from small_models import TINY

import mlxkv
from cuda_track.cache.latent import LatentKVCache
from cuda_track.calibrate import calibrate
from cuda_track.models import attach_model, prompt_cache
from cuda_track.models.loader import load
from cuda_track.models.transformers_compat import handed
from mlxkv.calibration import measure
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact
from mlxkv.formats.names import parse_kv
from mlxkv.generate import generation as mlx_generate
from mlxkv.generate import prompt_cache as mlx_prompt_cache

torch.set_num_threads(1)
IDS = np.random.default_rng(0).integers(5, 3000, 460).tolist()
KV = ("int4", "balanced-int3")
NEW = [5, 77, 300]


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """Two narrow layers of DeepSeek-V3 with latents of 128 and rotary keys of 32, without experts."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=3072, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=8, q_lora_rank=None, kv_lora_rank=128,
        qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=64, first_k_dense_replace=2,
        max_position_embeddings=8192, rms_norm_eps=1e-6, bos_token_id=1, eos_token_id=[4, 2],
        pad_token_id=0,
    )  # fmt: skip
    made = transformers.DeepseekV3ForCausalLM(config).half()
    for name, p in made.named_parameters():
        p.data += (0.1 if "norm" in name else 0.05) * torch.randn_like(p)
    out = tmp_path_factory.mktemp("mla") / "hub"
    made.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(Path(TINY) / name, out / name)
    return out


@pytest.fixture(scope="module")
def calibration(hub, tmp_path_factory) -> Path:
    """Made by MLX, for both."""
    path = tmp_path_factory.mktemp("calibration") / "file.safetensors"
    tokens = np.random.default_rng(1).integers(5, 3000, 1024).tolist()
    artifact.write_calibration(
        path, measure.calibrate(mlxkv.load(str(hub), "fp16", dtype="float32").model, tokens)
    )
    return path


@pytest.fixture(scope="module", params=KV)
def pair(request, hub, calibration):
    """The same model with the same preset on both sides, in float32."""
    more = {"calibration": str(calibration)} if request.param.startswith("balanced") else {}
    ours = load(str(hub), request.param, "float32", **more)
    return ours, mlxkv.load(str(hub), request.param, dtype="float32", **more)


def ours_read(made, cache, ids) -> np.ndarray:
    with torch.no_grad():
        return made.model(torch.tensor([ids]), **handed(cache)).logits[0].numpy()


def theirs_read(made, cache, ids) -> np.ndarray:
    return np.array(made.model(mx.array([ids]), cache=cache)[0])


def filled(pair):
    ours, theirs = pair
    mine, other = attach_model.new_cache(ours.model), mlx_generate.new_cache(theirs)
    ours_read(ours, mine, IDS)
    theirs_read(theirs, other, IDS)
    return mine, other


def test_both_say_the_same_step_by_step(pair):
    ours, theirs = pair
    mine, other = filled(pair)
    assert all(type(layer.cache) is LatentKVCache and layer.cache.store for layer in mine.layers)
    reports = [(r.reason, r.bits_per_value) for r in ours.layers]
    assert reports == [(r.reason, r.bits_per_value) for r in theirs.layers]
    for token in NEW:
        one, right = ours_read(ours, mine, [token]), theirs_read(theirs, other, [token])
        # A value at a boundary may take the other code.
        assert np.linalg.norm(one - right) < 0.02 * np.linalg.norm(right)


@pytest.mark.skipif(version("mlx-lm") < "0.32", reason="the files of mlx-lm 0.32")
def test_sessions_are_read_on_the_other_side(pair, tmp_path):
    ours, theirs = pair
    mine, other = filled(pair)
    path = tmp_path / "torch.safetensors"
    prompt_cache.save(path, prompt_cache.Saved(mine, IDS), ours)
    back = mlx_prompt_cache.load(str(path), theirs)
    again = prompt_cache.load(path, ours)
    right = ours_read(ours, mine, NEW)
    near = 1e-3 * np.abs(right).max()
    assert back.tokens == IDS
    assert np.abs(theirs_read(theirs, back.cache, NEW) - right).max() < near
    assert np.abs(ours_read(ours, again.cache, NEW) - right).max() < near

    saved = mlx_prompt_cache.Saved(other, IDS, [], "")
    path = mlx_prompt_cache.save(str(tmp_path / "mlx"), saved, theirs)
    got = ours_read(ours, prompt_cache.load(path, ours).cache, NEW)
    right = theirs_read(theirs, other, NEW)
    assert np.abs(got - right).max() < 1e-3 * np.abs(right).max()


@pytest.mark.skipif(version("mlx-lm") < "0.32", reason="the files of mlx-lm 0.32")
def test_a_session_from_before_rotary_keys_had_8_bits_says_how_to_read_it(hub, tmp_path):
    """Those files name int4 alone, whose rotary keys were exact."""
    older = mlxkv.load(str(hub), replace(parse_kv("int4"), rotary=16), dtype="float32")
    cache = mlx_generate.new_cache(older)
    theirs_read(older, cache, IDS)
    saved = mlx_prompt_cache.Saved(cache, IDS, [], "")
    path = mlx_prompt_cache.save(str(tmp_path / "older"), saved, older)
    assert mlx_prompt_cache.load(str(path), older).tokens == IDS
    said = r"rotary keys of 16 bits; got a preset that stores 8; choose .*rotary=16\)"
    with pytest.raises(UserError, match=said):
        mlx_prompt_cache.load(str(path), mlxkv.load(str(hub), "int4", dtype="float32"))
    with pytest.raises(UserError, match=said):
        prompt_cache.load(path, load(str(hub), "int4", "float32"))


def test_calibrating_here_is_refused_in_one_line(hub):
    made = load(str(hub), "int8", "float32")
    with pytest.raises(UserError, match="by mlxkv calibrate; got a model with latents"):
        calibrate(made, IDS * 2)
