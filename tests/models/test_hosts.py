"""Models that other programs load: attached, reported, refused, counted."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import pytest
from mlx_lm import generate
from mlx_lm.models.cache import make_prompt_cache
from random_models import random_model

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.models import detach
from mlxkv.models.calibration import measure
from mlxkv.models.hosts import given, ledger, watch, wrap
from mlxkv.models.origin import origin_of


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """MLXKV=int4, with accounts and reports of this test alone, and mlx-lm's functions put back afterwards."""
    monkeypatch.setenv(watch.KV, "int4")
    for name in (watch.STRICT, watch.QUIET, "MLX_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(given, "_told", set())
    monkeypatch.setattr(ledger.LEDGER, "_accounts", [])
    monkeypatch.setattr(ledger.LEDGER, "_open", True)  # nothing is said as the tests end
    wrap.wrap(mlx_lm.utils)
    yield
    wrap.unwrap(mlx_lm.utils)


def load(folder) -> tuple:
    """As a program does, by the name that it imported."""
    return mlx_lm.load(str(folder))


def is_compressed(model) -> bool:
    return isinstance(make_prompt_cache(model)[0], CompressedKVCache)


def test_what_a_program_loads_is_compressed_and_told_once(model_folder, capsys):
    model, tokenizer = load(model_folder)
    assert is_compressed(model)
    said = capsys.readouterr()
    assert said.out == "" and said.err.splitlines()[0] == f"[mlxkv] --kv int4: {model_folder}"
    assert "layers 0-1 (full attention): int4, 4.5 bits per value" in said.err
    again, _ = load(model_folder)
    assert is_compressed(again) and capsys.readouterr().err == ""
    detach(model), detach(again)


def test_the_longest_cache_is_measured(model_folder):
    model, tokenizer = load(model_folder)
    (account,) = ledger.LEDGER.accounts
    assert "no cache was filled, so nothing was compressed (no model was run)" in account.line()
    model(mx.zeros((1, 9), mx.int32))
    assert "the program reads text without one" in account.line()
    generate(model, tokenizer, "a" * 20, max_tokens=2)
    assert "nothing compressed yet: exact up to 192 tokens" in account.line()
    generate(model, tokenizer, "a" * 700, max_tokens=2)
    assert account.tokens >= 699 and account.plain == 2 * 2 * (64 + 64)  # layers, bytes, dims
    assert 0 < account.most < account.plain * account.tokens  # windows in float16
    generate(model, tokenizer, "a" * 300, max_tokens=2)
    assert account.tokens >= 699 and "longest cache 7" in account.line().replace("699", "7")
    detach(model)


def test_sequences_of_a_batch_are_added(model_folder):
    from mlx_lm import batch_generate

    model, tokenizer = load(model_folder)
    prompts = [tokenizer.encode("a" * n) for n in (300, 290)]
    batch_generate(model, tokenizer, prompts, max_tokens=4)
    (account,) = ledger.LEDGER.accounts
    assert (
        account.sequences == 2 and account.tokens >= 580 and " of 2 sequences in " in account.line()
    )
    detach(model)


@pytest.mark.parametrize("kv", ["learned-int2", "itn4"])
def test_a_refusal_leaves_the_model_as_it_was(model_folder, monkeypatch, capsys, kv):
    monkeypatch.setenv(watch.KV, kv)
    model, _ = load(model_folder)
    assert not is_compressed(model) and not ledger.LEDGER.accounts
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[mlxkv] caches stay in full precision: [")
    monkeypatch.setenv(watch.STRICT, "1")
    with pytest.raises(SystemExit) as end:
        load(model_folder)
    assert end.value.code == 2 and capsys.readouterr().err.startswith("[mlxkv] refused: [")


def test_strict_refuses_layers_that_stay(tmp_path, monkeypatch, capsys):
    class Odd(nn.Module):
        layers = ()

        def make_cache(self):
            raise RuntimeError("its own way")

        def __call__(self, inputs, cache=None):
            return inputs

    assert given.give(Odd(), "int4", False, "odd") is None
    assert "full precision: RuntimeError: its own way" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        given.give(Odd(), "int4", True, "odd")


def test_windows(monkeypatch, capsys):
    monkeypatch.setenv(watch.WINDOWS, "160")
    model = random_model("gemma3_text", sliding_window=160)
    reports = given.give(model, "naive-int2+sink4+recent16+page16", False, "one")
    assert all(report.compressed for report in reports) and "sliding" in capsys.readouterr().err
    detach(model)
    monkeypatch.setenv(watch.WINDOWS, "many")
    assert given.give(random_model("llama"), "int4", False, "one") is None
    assert "[MLXKV_WINDOWS] must be a number of tokens; got 'many'" in capsys.readouterr().err


def test_full_precision_is_a_preset(model_folder, monkeypatch, capsys):
    monkeypatch.setenv(watch.KV, "fp16")
    model, _ = load(model_folder)
    assert not is_compressed(model) and not ledger.LEDGER.accounts
    assert "in full precision as asked for" in capsys.readouterr().err
    monkeypatch.setenv(watch.KV, "0")
    assert not is_compressed(load(model_folder)[0]) and capsys.readouterr().err == ""


def test_quiet(model_folder, monkeypatch, capsys):
    monkeypatch.setenv(watch.QUIET, "1")
    model, _ = load(model_folder)
    ledger.LEDGER.tell()
    assert is_compressed(model) and capsys.readouterr().err == ""
    detach(model)


def test_a_calibration_is_made_where_there_is_none(model_folder, monkeypatch, tmp_path, capsys):
    """By the tokenizer that came with the model; and by one that is read, where the program took the model alone."""
    made = []

    def calibrate(model, origin):
        made.append(origin)
        tokens = origin.tokenizer.encode("The harbour of Amsel. " * 40)
        return measure.calibrate(model, tokens, text="test", window=512)

    monkeypatch.setattr(measure, "from_corpus", calibrate)
    monkeypatch.setattr("mlxkv.console.cache_dir", lambda: tmp_path)
    monkeypatch.setenv(watch.KV, "int2")
    model, tokenizer = load(model_folder)
    assert is_compressed(model) and origin_of(model) is made[0]
    assert made[0].tokenizer is tokenizer and made[0].folder == model_folder
    alone, _ = mlx_lm.utils.load_model(model_folder)
    assert is_compressed(alone) and len(made) == 1  # kept, and found
    assert origin_of(alone).fingerprint == made[0].fingerprint
    assert origin_of(alone).tokenizer.encode("a") == tokenizer.encode("a")
    detach(model), detach(alone)


def test_mlxkv_s_own_models_are_left_to_it(model_folder, capsys):
    from mlxkv.models import load as own

    loaded = own(str(model_folder), "int8")
    assert loaded.model.make_cache()[0].config.keys.quantizer.bits == 8
    assert capsys.readouterr().err == "" and not ledger.LEDGER.accounts
    detach(loaded.model)


def test_the_text_side_of_a_model_that_sees(model_folder):
    text = mlx_lm.utils.load_model(model_folder)[0]
    both = nn.Module()
    both.language_model = text
    assert given.language_model(both) is text and given.language_model(text) is text
    detach(text)


def test_a_model_that_is_shared_is_compressed_before(model_folder, monkeypatch, capsys):
    """With a group of two, of which this process is the first; `sharded_load` itself would need both."""
    seen = []
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    model, _ = getattr(mlx_lm.utils.load_model, wrap.OURS)(model_folder)
    monkeypatch.setattr(type(model), "shard", lambda self, group: seen.append(is_compressed(self)))
    monkeypatch.setattr(wrap._call, "folder", model_folder)
    wrap._before_it_is_shared((model, {}))
    model.shard(group)
    assert seen == [True] and "shard" not in vars(model)
    wrap._compress((model, None), "again")  # as `sharded_load` returns
    assert capsys.readouterr().err.count("[mlxkv] --kv int4: ") == 1
    detach(model)

    dealt, _ = getattr(mlx_lm.utils.load_model, wrap.OURS)(model_folder)
    dealt.model.__class__.pipeline = lambda self, group: seen.append("dealt")
    try:
        wrap._before_it_is_shared((dealt, {}))
        dealt.model.pipeline(group)
        wrap._compress((dealt, None), "dealt")
    finally:
        del dealt.model.__class__.pipeline
    assert seen[-1] == "dealt" and not is_compressed(dealt)
    (line,) = capsys.readouterr().err.splitlines()
    assert "full precision: layers are dealt to processes" in line


def test_other_threads_do_not_wait(model_folder):
    """One thread that loads does not hide what another one loads."""
    assert wrap._call.depth == 0
    wrap._call.depth = 1
    try:
        found = []
        import threading

        thread = threading.Thread(target=lambda: found.append(wrap._call.depth))
        thread.start(), thread.join()
    finally:
        wrap._call.depth = 0
    assert found == [0] and sys.modules["mlx_lm.utils"] is mlx_lm.utils
