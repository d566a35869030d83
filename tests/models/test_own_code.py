"""Families whose files have attention code of their own, reached through `hooks.rebind`: equal to plain
caches while nothing is sealed and with pages that hold exact numbers, in batches too."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from random_models import random_model, tokens

from mlxkv.formats.names import parse_kv
from mlxkv.models import attach, detach

FAMILIES = ("gear", "gemma2", "plamo2", "stablelm")
NEAR = replace(parse_kv("naive-int8"), sink=4, recent=16, page=32)


@pytest.fixture(params=FAMILIES)
def model(request):
    one = random_model(request.param)
    yield one
    detach(one)


def logits(model, ids, parts=(90, 7, 1, 1, 1)):
    caches, out, at = make_prompt_cache(model), [], 0
    for n in parts:
        out.append(model(ids[:, at : at + n], cache=caches))
        at += n
    return mx.concatenate(out, axis=1).astype(mx.float32)


def gap(one, other):
    return (mx.linalg.norm(one - other) / mx.linalg.norm(other)).item()


def test_logits_as_of_plain_caches(model):
    """Bit for bit while nothing is sealed and again behind `detach`; near with sealed pages in every layer."""
    ids = tokens(100)[None]
    plain = logits(model, ids)
    attach(model, "naive-int4")  # a window of more than 100 tokens
    assert mx.array_equal(logits(model, ids), plain).item()
    reports = attach(model, NEAR)
    assert all(r.compressed for r in reports if r.kind == "full attention")
    assert any(r.compressed for r in reports)
    assert 0 < gap(logits(model, ids), plain) < 0.02
    detach(model)
    assert mx.array_equal(logits(model, ids), plain).item()


def test_in_a_batch_each_sequence_is_as_alone(model):
    attach(model, NEAR)
    texts = [tokens(100, seed)[None] for seed in (1, 2)]
    texts[1] = texts[1][:, :70]
    each = [make_prompt_cache(model) for _ in texts]
    for caches, ids in zip(each, texts, strict=True):
        model(ids, cache=caches)
    both = [type(one).merge([one, other]) for one, other in zip(*each, strict=True)]
    step = mx.array([[5], [7]])
    alone = [model(step[i : i + 1], cache=caches) for i, caches in enumerate(each)]
    assert gap(model(step, cache=both), mx.concatenate(alone)) < 1e-5
