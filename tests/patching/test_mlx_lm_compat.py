"""The private parts of mlx-lm that mlxkv touches exist and do what it expects: a test for each function of
`patching/mlx_lm_compat`, in its order."""

import ast
import inspect
import re
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import base
from mlx_lm.models import cache as mlx_cache
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from random_models import random_model

from mlxkv.patching import mlx_lm_compat
from mlxkv.patching.mlx_lm_compat import (
    count_modules,
    forbid_merging,
    generation_batch,
    inner_tokenizer,
    keep_zero_bytes,
    model_classes,
    next_tokens,
    pads_right,
    reading_caches,
    register_caches,
    requested_size,
    ring_index,
    ring_tokens,
    set_next_tokens,
    set_ring_index,
    set_ring_tokens,
    wired,
)

TOKEN = mx.ones((1, 1, 1, 4))


def test_model_classes():
    model, args = model_classes({"model_type": "llama"})
    assert model.__module__ == args.__module__ == "mlx_lm.models.llama"
    with pytest.raises(ValueError, match="nosuch"):
        model_classes({"model_type": "nosuch"})


def test_register_caches(tmp_path, monkeypatch):
    class OfOurs(mlx_cache.KVCache):
        pass

    file = str(tmp_path / "cache.safetensors")
    cache = OfOurs()
    cache.update_and_fetch(TOKEN, TOKEN)
    mlx_cache.save_prompt_cache(file, [cache])
    with pytest.raises(KeyError):
        mlx_cache.load_prompt_cache(file)
    monkeypatch.setattr(mlx_cache, "OfOurs", None, raising=False)  # to be taken back
    register_caches(OfOurs)
    assert type(mlx_cache.load_prompt_cache(file)[0]) is OfOurs


def test_requested_size():
    class Model:
        asked = []

        def make_cache(self):
            self.asked.append(requested_size())

    mlx_cache.make_prompt_cache(model := Model(), 64)
    mlx_cache.make_prompt_cache(model)
    model.make_cache()
    assert model.asked == [64, None, None]


def test_forbid_merging():
    caches = mlx_cache.CacheList(mlx_cache.KVCache())
    assert hasattr(caches, "merge")
    forbid_merging(caches), forbid_merging(caches)
    assert not hasattr(caches, "merge") and type(caches).__name__ == "CacheList"


def test_rings():
    ring, rows = mlx_cache.RotatingKVCache(4), mlx_cache.BatchRotatingKVCache(4, [0])
    for count in range(1, 7):
        for cache in (ring, rows):
            cache.update_and_fetch(TOKEN, TOKEN)
            assert ring_index(cache) == (count if count <= 4 else count - 4)
        assert ring_tokens(rows) == count
    set_ring_index(ring, 3)
    cache_keys, _ = ring.update_and_fetch(2 * TOKEN, TOKEN)
    assert cache_keys[0, 0, 3, 0] == 2
    set_ring_tokens(rows, 9)
    rows.update_and_fetch(TOKEN, TOKEN)
    assert ring_tokens(rows) == 10


def test_pads_right():
    cache = mlx_cache.BatchRotatingKVCache(4, [0, 0])
    assert not pads_right(cache)
    cache.prepare(lengths=[1, 2], right_padding=[1, 0])
    assert pads_right(cache)


def test_wired(monkeypatch):
    calls = []
    monkeypatch.setattr(
        sys.modules["mlx_lm.generate"],
        "maybe_set_recommended_wired_limit",
        lambda: calls.append("set"),
    )
    for allowed in (False, True):
        with wired(allowed):
            BatchGenerator(nn.Module()).close()
        assert calls == ["set"] * allowed


def test_batches_of_a_generator():
    generator = BatchGenerator(random_model("llama"), max_tokens=8, prefill_step_size=2)
    generator.insert([[1, 2, 3, 4, 5]])
    generator.next()
    (cache, *_) = reading_caches(generator)
    assert cache.offset.item() == 2
    while not generation_batch(generator).uids:
        generator.next()
    batch = generation_batch(generator)
    assert next_tokens(batch).shape == (1,)
    set_next_tokens(batch, mx.array([7]))
    assert [response.token for response in generator.next()[1]] == [7]
    generator.close()


def test_inner_tokenizer():
    one = object()
    wrapper = TokenizerWrapper.__new__(TokenizerWrapper)
    vars(wrapper)["_tokenizer"] = one
    assert inner_tokenizer(wrapper) is one
    assert "_tokenizer" in inspect.getsource(TokenizerWrapper.__init__)


def test_keep_zero_bytes():
    class Tokenizer:
        vocab, clean_up_tokenization_spaces = {"a\u0100b": 0}, False

        def __len__(self):
            return 1

        def convert_ids_to_tokens(self, ids):
            return [*self.vocab]

    detokenizer = BPEStreamingDetokenizer(Tokenizer())
    keep_zero_bytes(detokenizer)
    detokenizer.add_token(0)
    detokenizer.finalize()
    assert detokenizer.text == "a\0b"
    keep_zero_bytes(object())


def test_count_modules():
    made = []
    with count_modules(lambda: made.append(1)):
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nn.Linear(2, 2)
    assert len(made) == 3


def test_attention_that_asks_for_bits():
    """`cache.contract.Contract.bits` knows mlx-lm's attention by its name, and looks at its local `keys`."""
    code = base.scaled_dot_product_attention.__code__
    assert "keys" in code.co_varnames and "bits" in code.co_consts
    assert code.co_name == "scaled_dot_product_attention"


PRIVATE = {"_get_classes", "_idx", "_offset", "_prompt_batch", "_generation_batch", "_next_tokens"}
PRIVATE |= {"_tokenizer", "_decode_bytes", "_getframe"}


def test_nothing_else_touches_private_parts():
    package = Path(mlx_lm_compat.__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        if file.name in ("mlx_lm_compat.py", "contract.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("mlx.", "mlx_")):
                private = [x.name for x in node.names if re.match("_[^_]", x.name)]
                assert not private, (file, node.lineno)
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") != "self":
                assert node.attr not in PRIVATE, (file, node.lineno)
