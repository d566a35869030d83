"""Layers with a sliding window, compressed where `attach(windows=...)` asks for it."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache
from random_models import random_model, tokens

from mlxkv.cache.rotating import WindowedKVCache
from mlxkv.chat import answer
from mlxkv.chat.options import ChatOptions
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig, Full, Side
from mlxkv.formats.names import parse_kv
from mlxkv.models import attach, detach, summarise
from mlxkv.models.hooks import layers
from mlxkv.models.usage import in_16_bits, in_use
from mlxkv.serve import engine
from mlxkv.serve.options import ServeOptions


class Lossless(CacheConfig):
    """Pages that hold the numbers themselves."""

    compresses = True


INT4 = replace(parse_kv("naive-int4"), sink=4, recent=16, page=16)
WINDOW = 160
FAMILIES = {
    "gemma3_text": {"sliding_window": WINDOW},
    "gemma4_text": {"sliding_window": WINDOW},
    "gpt_oss": {"sliding_window": WINDOW},
}


@pytest.fixture(params=FAMILIES, scope="module")
def model(request):
    one = random_model(request.param, **FAMILIES[request.param])
    yield one
    detach(one)


def logits(model, ids, parts):
    caches, out, at = make_prompt_cache(model), [], 0
    for n in parts:
        out.append(model(ids[:, at : at + n], cache=caches)[:, -1:])
        at += n
    return mx.concatenate(out, axis=1).astype(mx.float32), caches


def kl(one, other):
    """Mean KL divergence of the next token from `other` to `one`, in nats."""
    p, q = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (other, one))
    return (mx.exp(p) * (p - q)).sum(-1).mean().item()


def test_windows_are_compressed_only_where_asked_for(model):
    for windows, kinds in ((None, set()), (WINDOW + 1, set()), (WINDOW, {WindowedKVCache})):
        reports = attach(model, INT4, windows=windows)
        caches = make_prompt_cache(model)
        rings = [c for c, r in zip(caches, reports, strict=True) if "window" in r.kind]
        assert {type(c) for c in rings} & {WindowedKVCache} == kinds
        assert all(not r.grows for r in reports if "window" in r.kind)
    assert all(c.max_size == WINDOW for c in rings)


def test_text_is_near_the_plain_one_far_behind_the_window(model):
    detach(model)
    ids, parts = tokens(420)[None], [300, 100] + [1] * 10
    plain, _ = logits(model, ids, parts)
    attach(model, INT4, windows=WINDOW)
    ours, caches = logits(model, ids, parts)
    assert any(type(c) is WindowedKVCache and c.dropped for c in caches)
    assert 0 < kl(ours, plain) < 0.2  # 4 bits; untrained weights make much of them
    rings = [c for c in caches if type(c) is WindowedKVCache]
    assert sum(map(in_use, rings)) < 0.6 * 2 * sum(map(in_16_bits, rings))  # of 32 bits


def test_lossless_pages_give_the_plain_text(model, monkeypatch):
    """All that the window decides: what is seen, where, and what has gone."""
    detach(model)
    monkeypatch.setattr(layers, "MOST_OF_WINDOW", 2)
    ids, parts = tokens(420)[None], [300, 100] + [1] * 10
    plain, _ = logits(model, ids, parts)
    full = Lossless(Side(Full()), Side(Full()), sink=4, recent=16, page=16)
    attach(model, full, windows=WINDOW)
    ours, caches = logits(model, ids, parts)
    assert any(type(c) is WindowedKVCache and c.dropped for c in caches)
    assert mx.abs(ours - plain).max().item() < 1e-4
    detach(model)


def test_nothing_sealed_is_bit_for_bit(model):
    detach(model)
    ids, parts = tokens(100)[None], [60, 20] + [1] * 10
    plain, _ = logits(model, ids, parts)
    attach(model, "naive-int4", windows=WINDOW)  # 64 + 64 + 64 tokens are exact: no ring of 160
    exact, _ = logits(model, ids, parts)
    assert mx.array_equal(exact, plain).item()


def test_batches_are_as_alone(model):
    attach(model, INT4, windows=WINDOW)
    texts = [tokens(n, seed).tolist() for n, seed in ((230, 1), (90, 2))]

    def alone(text):
        steps = generate_step(mx.array(text), model, max_tokens=6)
        return [int(token) for token, _ in steps]

    batch = BatchGenerator(model, max_tokens=6)
    ids = batch.insert(texts)
    found = {one: [] for one in ids}
    for _ in range(100):
        for part in batch.next()[1]:
            found[part.uid].append(part.token)
        if all(len(one) >= 6 for one in found.values()):
            break
    batch.close()
    assert [found[one] for one in ids] == [alone(text) for text in texts]


def test_reports_say_what_a_window_costs_and_why_not():
    model = random_model("gemma3_text", sliding_window=1024)
    lines = summarise(attach(model, "naive-int4", windows=1024))
    assert lines[0].startswith("layers 0, 2 (sliding window 1024): naive-int4, 4.5 bits per value")
    detach(model)
    model = random_model("gemma3_text", sliding_window=512)
    lines = summarise(attach(model, "naive-int8", windows=1))
    assert "small by nature (7" in lines[0]
    detach(model)


def test_commands_ask_for_windows(monkeypatch):
    """`--kv-windows` of chat and serve reaches `attach`, and bad numbers are refused before a model is read."""
    asked = []

    def load(*_, windows=None, **__):
        asked.append(windows)
        raise UserError("[load] far enough")

    monkeypatch.setattr(answer, "load", load)
    monkeypatch.setattr(engine, "load", load)
    with pytest.raises(UserError, match="far enough"):
        answer.talk(ChatOptions(kv_windows=1024), "hello")
    with pytest.raises(UserError, match="far enough"):
        engine.load_model(ServeOptions(kv_windows=2048))
    assert asked == [1024, 2048]
    for options in (ChatOptions, ServeOptions):
        with pytest.raises(UserError, match=r"\[--kv-windows\] must be at least 1 token; got 0"):
            options(kv_windows=0)
