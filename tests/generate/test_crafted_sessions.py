"""Session files that somebody changed and signed again: one line that names the file, and nothing is used."""

import os
import time
from types import SimpleNamespace

import crafted_files
import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from random_models import random_model

from mlxkv.errors import UserError
from mlxkv.formats.names import parse_kv
from mlxkv.generate import prompt_cache
from mlxkv.loading.attach import attach

MODELS = {
    "llama-int4": ("llama", "int4"),
    "llama-fp16": ("llama", "fp16"),
    "sliding": ("gemma3_text", "int4"),
    "states": ("qwen3_next", "int4"),
    "selects": ("llama", "int4+keep0.5"),
}


def talk(family: str, kv: str, count: int = 400):
    """(a model as `prompt_cache` sees it, a session of it)."""
    model = random_model(family)
    attach(model, kv)
    loaded = SimpleNamespace(model=model, config={"vocab_size": 64})
    loaded.name, loaded.fingerprint, loaded.kv_name, loaded.kv = "random", "f", kv, parse_kv(kv)
    cache, tokens = make_prompt_cache(model), mx.random.randint(0, 60, (1, count))
    for start in range(0, count, 128):
        model(tokens[:, start : start + 128], cache=cache)
        mx.eval([one.state for one in cache])
    messages = [{"role": "user", "content": "hi"}]
    return loaded, prompt_cache.Saved(cache, tokens[0].tolist(), messages, "hi")


@pytest.fixture(scope="module", params=MODELS)
def session(request, tmp_path_factory):
    loaded, saved = talk(*MODELS[request.param])
    path = prompt_cache.save(str(tmp_path_factory.mktemp("talk") / "good"), saved, loaded)
    return loaded, path.read_bytes(), path.with_name("bad.safetensors")


def test_what_is_taken_apart_and_put_together_is_read(session):
    loaded, good, path = session
    path.write_bytes(crafted_files.Crafted(good).file())
    assert prompt_cache.read_session(path, loaded).text == "hi"


def test_nothing_that_was_changed_is_used(session):
    loaded, good, path = session
    for name, data in crafted_files.cases(good, every=4):
        path.write_bytes(data)
        start = time.process_time()
        with pytest.raises(UserError) as caught:
            prompt_cache.read_session(path, loaded)
            pytest.fail(f"{name} was used")
        said = str(caught.value)
        assert said.startswith(f"[load] {str(path)!r} ") and said.isprintable(), (name, said)
        assert time.process_time() - start < 2, name


def test_what_is_no_file(session, tmp_path):
    loaded = session[0]
    for name, put in crafted_files.odd_files(tmp_path, "x.safetensors"):
        put()
        for follow in (True, False):
            with pytest.raises(UserError, match=r"^\[load\]"):
                prompt_cache.read_session(tmp_path / "x.safetensors", loaded, follow)
        path = tmp_path / "x.safetensors"
        (os.rmdir if path.is_dir() and not path.is_symlink() else os.unlink)(path)
        assert os.listdir(tmp_path) == [], name


def test_every_family_reads_what_it_saved(tmp_path):
    others = ("gemma3n", "int4"), ("mamba2", "fp16"), ("deepseek_v3", "fp16"), ("falcon_h1", "int4")
    for family, kv in others:
        for count in (3, 200):
            loaded, saved = talk(family, kv, count)
            path = prompt_cache.save(str(tmp_path / "talk"), saved, loaded)
            back = prompt_cache.read_session(path, loaded)
            assert back.tokens == saved.tokens
            assert [type(one) for one in back.cache] == [type(one) for one in saved.cache]
            more = mx.array([[7]])
            again, right = (loaded.model(more, cache=one.cache) for one in (back, saved))
            assert mx.array_equal(again, right)
