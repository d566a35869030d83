"""Loading: names, types, what comes back, and mistakes in the options."""

# ruff: noqa: F401, F811 (the fixtures `saved` and `folder` are imported)
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate, stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import quantize_model
from random_models import WEIGHTS, config_of, error_of, folder, random_model, save, saved, tokens

from mlxkv import console
from mlxkv.catalog.aliases import HUB, PACKAGES, Source, resolve
from mlxkv.catalog.shapes import context_limit
from mlxkv.errors import UserError
from mlxkv.formats.presets import PRESETS
from mlxkv.loading import weights
from mlxkv.loading.attach import attach, detach
from mlxkv.loading.load import load
from mlxkv.metal import launch


def test_a_folder_loads_and_is_attached(folder):
    with launch.using(None):
        loaded = load(str(folder), "naive-int4")
    assert (loaded.kv, loaded.kv_name) == (PRESETS["naive-int4"], "naive-int4")
    assert (loaded.path, loaded.name, loaded.context) == (folder, str(folder), 512)
    assert loaded.report() == [
        "layers 0-1 (full attention): naive-int4, 4.5 bits per value, plain ops (no GPU here)"
    ]
    assert loaded.tokenizer.encode("w3 w5") == [3, 5] and loaded.tokenizer.eos_token_ids == {0}
    assert type(make_prompt_cache(loaded.model)[0]).__name__ == "CompressedKVCache"
    detach(loaded.model)
    text = tokens(12)[None]
    assert mx.array_equal(loaded.model(text), random_model("llama")(text))


def test_16_bit_weights_become_float32_where_there_is_no_gpu(tmp_path):
    model = random_model("llama")
    model.set_dtype(mx.bfloat16)
    save(tmp_path, model, config_of("llama"))
    asked = load(str(tmp_path), dtype="float16")
    assert asked.dtype == mx.float16 and asked.notes == []
    loaded = load(str(tmp_path))
    if mx.default_device() == mx.Device(mx.cpu):
        assert (
            loaded.dtype == mx.float32 and "bfloat16 weights run as float32" in loaded.report()[-1]
        )
    else:
        assert loaded.dtype == mx.bfloat16 and loaded.notes == []


def test_quantised_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "DECODED", 0)  # without a GPU small models are decoded
    model, config = quantize_model(random_model("llama"), config_of("llama"), 32, 8)
    save(tmp_path, model, config)
    loaded = load(str(tmp_path), "naive-int4")
    assert loaded.dtype == mx.float32 and loaded.layers[0].compressed
    text = tokens(12)[None]
    assert mx.array_equal(loaded.model(text), model(text))
    detach(loaded.model)


@pytest.mark.parametrize(("bits", "tied"), [(None, False), (4, True)])
def test_matrices_by_columns_give_the_logits_of_matrices_by_rows(bits, tied, monkeypatch):
    monkeypatch.setattr(weights.startup, "has_openblas", False)  # as without a C compiler
    model, config = random_model("llama", tie_word_embeddings=tied), config_of("llama")
    if bits is not None:
        quantize_model(model, config, 32, bits)
    text = tokens(12)[None]
    want, plain = np.array(model(text)), dict(tree_flatten(model.parameters()))
    weights.fit_cpu(model)
    np.testing.assert_allclose(np.array(model(text)), want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.array(model(text[:, :1])), want[:, :1], rtol=1e-4, atol=1e-4)
    for name, found in tree_flatten(model.parameters()):
        assert "scales" not in name
        if bits is None:
            assert mx.array_equal(found, plain[name])
        if found.ndim == 2:
            assert np.array(found, copy=False).strides == (4, 4 * found.shape[0]), name


def test_load_defaults_as_the_commands_do(folder):
    from mlxkv.chat.options import ChatOptions
    from mlxkv.serve.options import ServeOptions

    loaded = load(str(folder))
    assert loaded.kv_name == ChatOptions().kv == ServeOptions().kv == "int4"
    assert any(layer.compressed for layer in loaded.layers)


def test_what_is_loaded_unpacks_and_has_a_short_name(folder):
    loaded = load(str(folder), "fp16")
    model, tokenizer = loaded
    assert model is loaded.model and tokenizer is loaded.tokenizer
    assert len(repr(loaded)) < 200 and "kv='fp16'" in repr(loaded) and str(folder) in repr(loaded)


def test_progress_tells_the_bytes_that_are_read(folder, monkeypatch):
    monkeypatch.setattr("mlxkv.loading.weights.AT_ONCE", 1 << 14)
    told = []
    loaded = load(str(folder), "fp16", progress=lambda *counts: told.append(counts))
    whole = sum(x.nbytes for _, x in tree_flatten(loaded.model.parameters()))
    assert told[0] == (0, whole) and told[-1] == (whole, whole) and len(told) > 4
    assert [done for done, _ in told] == sorted({done for done, _ in told})


def test_other_names_of_dtypes(folder):
    assert load(str(folder), "fp16", dtype="fp16").dtype == mx.float16
    with pytest.raises(UserError, match="unknown dtype; got 'fp8'; choose from float32"):
        load(str(folder), "fp16", dtype="fp8")


def test_importing_the_names_imports_no_framework(with_torch):
    code = (
        "import sys, mlxkv.loading\n"
        "from mlxkv.catalog import aliases, folder, hub\n"
        "heavy = {'mlx', 'mlx_lm', 'numpy', 'torch', 'transformers', 'huggingface_hub'} & "
        "set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_folder_on_this_machine_wins_over_the_hub(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    (folder.parent / "owner" / "name").mkdir(parents=True)
    assert resolve("owner/name").folder == Path("owner/name")


def test_unknown_names():
    for name in ["gema-3-1b", "", "a b", "../missing", "a/b/c", "Tiny"]:
        text = error_of(name)
        assert f"got {name!r}" in text and "choose a name that mlxkv models lists" in text
        if name == "gema-3-1b":
            assert "did you mean gemma-3-1b" in text


def test_a_file_is_no_model(folder):
    assert "name its folder" in error_of(folder / WEIGHTS)


def test_mistakes_in_the_options_cost_no_loading(monkeypatch):
    monkeypatch.setattr("mlxkv.loading.load.fetch", lambda repo: pytest.fail("went to the hub"))
    assert "unknown preset; got 'int5'" in error_of("gemma-3-1b", kv="int5")
    assert "unknown dtype; got 'int8'" in error_of("gemma-3-1b", dtype="int8")


LONG = 131072


def yarn(factor: float, original: int) -> dict:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}


def test_too_few_bits_are_told_once_before_the_work(folder, monkeypatch, capsys):
    def build(*args):
        raise UserError("[load] stops here; got it")

    monkeypatch.setattr(weights, "build", build)
    monkeypatch.setattr(console, "_warned", set())
    for kv in (1, "fill-2", 1, 2.25, 3, "int4"):
        error_of(folder, kv=kv)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        "--kv fill-1 is below fill-2.25",
        "--kv fill-2 is below fill-2.25",
    ]


def test_context_limit():
    for positions, scaling, limit in [
        (4096, None, 4096),
        (4096, {"type": "linear", "factor": 4.0}, 16384),
        # Llama 3.1 and Phi name the extended length themselves.
        (LONG, {"rope_type": "llama3", "factor": 8.0}, LONG),
        (LONG, {"type": "longrope", "long_factor": [1.0]}, LONG),
        # Qwen writes the plain length beside yarn, gpt-oss the extended one.
        (40960, yarn(4.0, 32768), LONG),
        (LONG, yarn(32.0, 4096), LONG),
    ]:
        config = {"max_position_embeddings": positions, "rope_scaling": scaling}
        assert context_limit(config) == limit
    assert context_limit({}) is None and context_limit({"n_positions": 1024}) == 1024
    text = {"max_position_embeddings": LONG, "rope_scaling": {"type": "linear", "factor": 8.0}}
    gemma = {"model_type": "gemma3", "text_config": text | {"model_type": "gemma3_text"}}
    assert context_limit(gemma) == LONG
    several = {"max_position_embeddings": 100, "rope_parameters": {"full": {"rope_theta": 1.0}}}
    assert context_limit(several) == 100


def test_the_package_itself_gives_load_attach_and_detach():
    import mlxkv

    assert (mlxkv.load, mlxkv.attach, mlxkv.detach) == (load, attach, detach)
    assert {"load", "attach", "detach"} <= set(dir(mlxkv))
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = mlxkv.lode


def test_generating_text_by_mlx_lm(folder):
    loaded = load(str(folder), "int8/int4")
    options = {"max_tokens": 6, "prompt": "w3 w5 w7 w9"}
    replies = list(stream_generate(loaded.model, loaded.tokenizer, **options))
    assert replies[-1].generation_tokens <= 6 and replies[-1].prompt_tokens == 4
    text = "".join(reply.text for reply in replies)
    assert generate(loaded.model, loaded.tokenizer, **options) == text
    detach(loaded.model)
