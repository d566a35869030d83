"""Models that other programs load: attached, reported, refused, counted."""

import inspect
import sys
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import pytest
from adapters import write_adapter
from mlx_lm import generate
from mlx_lm.models.cache import make_prompt_cache

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.calibration import measure
from mlxkv.formats.names import parse_kv
from mlxkv.loading.attach import detach
from mlxkv.patching.mark import origin_of
from mlxkv.run import Options, attach_loaded, wrap

INT4 = parse_kv("int4")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Accounts and reports of this test alone."""
    monkeypatch.setattr(attach_loaded, "_reports", set())
    monkeypatch.setattr(attach_loaded, "TRACKED", [])
    monkeypatch.setattr(attach_loaded.atexit, "register", lambda ask: None)


@pytest.fixture
def asking(monkeypatch):
    """Has mlx-lm's loaders wrapped, as a program finds them."""

    def ask(kv: str = "int4", **more) -> Options:
        for name in wrap.LOADERS["mlx_lm.utils"]:
            original = getattr(mlx_lm.utils, name)
            monkeypatch.setattr(mlx_lm.utils, name, getattr(original, "__wrapped__", original))
        wrap.wrap(mlx_lm.utils, options := Options(parse_kv(kv), **more))
        return options

    ask()
    return ask


def load(folder) -> tuple:
    return mlx_lm.utils.load(str(folder))


def is_compressed(model) -> bool:
    return isinstance(make_prompt_cache(model)[0], CompressedKVCache)


def test_what_a_program_loads_is_compressed_and_told_once(model_folder, asking, capsys):
    model, tokenizer = load(model_folder)
    assert is_compressed(model)
    said = capsys.readouterr()
    assert said.out == "" and said.err.splitlines()[0] == f"[mlxkv] --kv int4: {model_folder}"
    assert "layers 0-1 (full attention): int4, 4.5 bits per value" in said.err
    again, _ = load(model_folder)
    assert is_compressed(again) and capsys.readouterr().err == ""
    detach(model), detach(again)


def test_the_longest_cache_is_measured(model_folder, asking):
    model, tokenizer = load(model_folder)
    (usage,) = attach_loaded.TRACKED
    assert "no cache was filled, so nothing was compressed (no model was run)" in usage.line()
    model(mx.zeros((1, 9), mx.int32))
    assert "the program reads text without one" in usage.line()
    generate(model, tokenizer, "a" * 20, max_tokens=2)
    assert "nothing compressed yet: exact up to 192 tokens" in usage.line()
    generate(model, tokenizer, "a" * 700, max_tokens=2)
    assert usage.tokens >= 699 and usage.plain == 699 * 2 * 2 * (64 + 64)  # layers, bytes, dims
    assert 0 < usage.bytes < usage.plain * usage.tokens  # windows in float16
    generate(model, tokenizer, "a" * 300, max_tokens=2)
    assert usage.tokens >= 699 and "longest cache 7" in usage.line().replace("699", "7")
    detach(model)


def test_sequences_of_a_batch_are_added(model_folder, asking):
    from mlx_lm import batch_generate

    model, tokenizer = load(model_folder)
    prompts = [tokenizer.encode("a" * n) for n in (300, 290)]
    batch_generate(model, tokenizer, prompts, max_tokens=4)
    (usage,) = attach_loaded.TRACKED
    assert usage.sequences == 2 and usage.tokens >= 580 and " of 2 sequences in " in usage.line()
    detach(model)


def test_a_refusal_leaves_the_model_as_it_was(model_folder, asking, capsys):
    asking(kv := "learned-int2")
    model, _ = load(model_folder)
    assert not is_compressed(model) and not attach_loaded.TRACKED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[mlxkv] caches stay in full precision: [")
    asking(kv, strict=True)
    with pytest.raises(SystemExit) as end:
        load(model_folder)
    assert end.value.code == 2 and capsys.readouterr().err.startswith("[mlxkv] refused: [")


def test_strict_refuses_layers_that_stay(capsys):
    class Odd(nn.Module):
        layers = ()

        def make_cache(self):
            raise RuntimeError("its own way")

        def __call__(self, inputs, cache=None):
            return inputs

    assert attach_loaded.compress(Odd(), Options(INT4), "odd") is None
    assert "full precision: RuntimeError: its own way" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        attach_loaded.compress(Odd(), Options(INT4, strict=True), "odd")


def test_quiet(model_folder, asking, monkeypatch, capsys):
    monkeypatch.setattr(attach_loaded.atexit, "register", lambda ask: ask())
    asking(quiet=True)
    model, _ = load(model_folder)
    assert is_compressed(model) and capsys.readouterr().err == ""
    detach(model)


def test_a_calibration_is_made_where_there_is_none(model_folder, asking, monkeypatch, tmp_path):
    """By the tokenizer that came with the model; and by one that is read, where the program took the model alone."""
    made = []

    def calibrate(model, origin):
        made.append(origin)
        tokens = origin.tokenizer.encode("The harbour of Amsel. " * 40)
        return measure.calibrate(model, tokens, text="test", window=512)

    monkeypatch.setattr(measure, "from_corpus", calibrate)
    monkeypatch.setattr("mlxkv.console.cache_dir", lambda: tmp_path)
    asking("int2")
    model, tokenizer = load(model_folder)
    assert is_compressed(model) and origin_of(model) is made[0]
    assert made[0].tokenizer is tokenizer and made[0].folder == model_folder
    alone, _ = mlx_lm.utils.load_model(model_folder)
    assert is_compressed(alone) and len(made) == 1  # kept, and found
    assert origin_of(alone).fingerprint == made[0].fingerprint
    assert origin_of(alone).tokenizer.encode("a") == tokenizer.encode("a")
    detach(model), detach(alone)


def test_mlxkv_s_own_models_are_left_to_it(model_folder, asking, capsys):
    from mlxkv.loading.load import load as own

    loaded = own(str(model_folder), "int8")
    assert loaded.model.make_cache()[0].config.keys.quantizer.bits == 8
    assert capsys.readouterr().err == "" and not attach_loaded.TRACKED
    detach(loaded.model)


def test_layers_that_are_dealt_to_processes_stay(model_folder, asking, capsys):
    options = asking()
    model = mlx_lm.utils.load_model.__wrapped__(model_folder)[0]
    model.model.pipeline_size = 2
    attach_loaded.compress((model, None), options, "dealt")
    assert not is_compressed(model)
    (line,) = capsys.readouterr().err.splitlines()
    assert "full precision: layers are dealt to processes" in line


# A host without a framework, where `load` calls `load_model`.
UTILS = """
def load_model(path, lazy=False):
    "Read."
    return "model of " + str(path), {}
def load(path):
    return load_model(path)[0], "tokenizer"
"""


def test_loaders_are_wrapped_as_a_program_imports_them(tmp_path, monkeypatch):
    package = tmp_path / "mlx_lm"
    package.mkdir()
    (package / "__init__.py").write_text("from mlx_lm.utils import load\n")
    (package / "utils.py").write_text(UTILS)
    known = [name for name in sys.modules if name.partition(".")[0] == "mlx_lm"]
    for name in known:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    given = []
    monkeypatch.setattr(
        attach_loaded,
        "compress",
        lambda found, options, name, *folders: given.append((found, name)),
    )
    wrap.watch(Options(INT4))
    host = import_module("mlx_lm")
    try:
        assert host.load("x") == ("model of x", "tokenizer")
        assert given == [(("model of x", "tokenizer"), "x")]  # once, of the outermost call
        assert host.utils.load_model(Path("y"))[0] == "model of y" and given[1][1] == "y"
        assert wrap._call.folder == Path("y")
        assert host.utils.load_model(lazy=True, path="y") and wrap._call.folder is None
        with pytest.raises(TypeError):
            host.load()
        assert host.load("z") and len(given) == 4  # an error leaves nothing behind
        assert host.utils.load_model.__doc__ == "Read."
        assert "load_model" in inspect.getsource(host.utils)
    finally:
        for name in ("mlx_lm.utils", "mlx_lm"):
            sys.modules.pop(name)


def test_with_an_adapter_it_is_another_model(model_folder, asking, monkeypatch, tmp_path):
    made = []

    def calibrate(model, origin):
        made.append(origin)
        tokens = origin.tokenizer.encode("The harbour of Amsel. " * 40)
        return measure.calibrate(model, tokens, text="test", window=512)

    monkeypatch.setattr(measure, "from_corpus", calibrate)
    monkeypatch.setattr("mlxkv.console.cache_dir", lambda: tmp_path)
    plain = mlx_lm.utils.load_model.__wrapped__(model_folder)[0]
    adapter = write_adapter(tmp_path / "adapter", plain)
    asking("int2")
    read = mlx_lm.utils.load
    models = [read(str(model_folder))[0], read(str(model_folder), None, None, str(adapter))[0]]
    assert "lora_a" in models[1].layers[0].self_attn.o_proj and is_compressed(models[1])
    assert len(made) == 2 and made[0].fingerprint != made[1].fingerprint
    assert made[1].folder == adapter
    for model in models:
        detach(model)
