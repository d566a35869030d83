"""Caches in use never take more memory than their requests were promised, and /v1/kv says how many tokens may be."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache
from serving import ENDLESS, asking, complete, get, held, refused, serving, settled, until

from mlxkv.serve.caches.memory import cut_padding, shapes_of
from mlxkv.serve.engine import Engine

TEXT = "All work and no play makes Jack a dull boy. " * 40


@pytest.fixture
def used(monkeypatch) -> list[tuple[int, int]]:
    """(bytes in use after, bytes promised before) for each step of a server's batch: requests that end in
    a step have their promise before it."""
    found: list[tuple[int, int]] = []
    plain = Engine.step

    def step(self):
        before = self.memory.promised
        plain(self)
        found.append((self._generator.prompt_cache_nbytes, before))

    monkeypatch.setattr(Engine, "step", step)
    return found


@pytest.mark.parametrize("kv", ["fp16", "int4"])
@pytest.mark.parametrize("folder", ["model_folder", "gemma_folder"])
def test_a_server_keeps_what_it_promised(kv, folder, request, used):
    """Requests of many lengths at once, which share beginnings and end at different times."""
    draw = random.Random(kv)
    asked = []
    for i in range(24):
        start, size = draw.choice((0, 0, 7, i)), round(4 * 400 ** draw.random())
        asked.append((TEXT[start : start + size], draw.choice((1, 9, 40))))
    with serving(request.getfixturevalue(folder), kv=kv, chunk=100) as server:
        with ThreadPoolExecutor(7) as pool:
            jobs = [pool.submit(complete, server, *one) for one in asked]
            assert all(job.result()["choices"] for job in jobs)
        assert settled(server)["memory"]["promised_bytes"] == 0
    assert len(used) > 60
    assert all(taken <= promised for taken, promised in used)


@pytest.mark.parametrize("kv", ["fp16", "int4"])
def test_short_ends_beside_long_beginnings(model_folder, kv, used, monkeypatch):
    """One request goes on from a session, others start from nothing: mlx-lm's batches pad the first by a
    chunk of the others."""
    with serving(model_folder, kv=kv, chunk=400) as server:
        complete(server, TEXT[:1000], 1)
        used.clear()
        prompts = [TEXT[:1004] + "?", *(f"{i}{TEXT[:size]}" for i, size in enumerate((410, 820)))]
        sessions, waiting = server.engine.sessions, server.engine.requests
        with (
            ThreadPoolExecutor(3) as pool,
            held(monkeypatch, sessions, "fetch") as go,  # all are taken up together
        ):
            replies = [pool.submit(complete, server, prompt, 1) for prompt in prompts]
            until(lambda: waiting.qsize() == 2)  # behind the first
            go.set()
            assert all(reply.result() for reply in replies)
    assert len(used) > 2 and all(taken <= promised for taken, promised in used)


@pytest.mark.parametrize("kv", ["fp16", "int4"])
def test_so_many_are_admitted_and_one_more_is_not(model_folder, kv):
    with serving(model_folder, kv=kv, kv_memory="400KB", max_requests=4) as server:
        idle = get(server, "/v1/kv")
        most = idle["safe_tokens"]
        assert most == idle["longest_tokens"] < 2048
        text = "a" * (most - 5)
        assert complete(server, text, 5)["usage"]["total_tokens"] == most
        assert refused(server, 503, prompt=text, max_tokens=6)["code"] == "kv_memory"
        assert settled(server)["safe_tokens"] == most  # sessions that are kept make room
    with serving(model_folder, kv=kv) as server:
        assert get(server, "/v1/kv")["safe_tokens"] == 2048  # the context's


@pytest.mark.parametrize("kv", ["fp16", "int4"])
def test_what_others_were_promised_is_not_safe(model_folder, kv):
    bound = {"fp16": "5000KB", "int4": "1MB"}[kv]
    with serving(model_folder, kv=kv, kv_memory=bound, timeout=60) as server:
        with asking(server, **ENDLESS | {"prompt": "b" * 200, "stream": True}):
            until(lambda: get(server, "/v1/kv")["memory"]["promised_bytes"])
            busy = get(server, "/v1/kv")
            assert busy["longest_tokens"] == 2048
            most = busy["safe_tokens"]
            complete(server, "a" * (most - 2), 2)  # admitted at once
            assert 100 < most < 2048
            error = refused(server, 503, prompt="a" * (most - 2), max_tokens=3)
            assert error["code"] == "kv_memory_busy"


@pytest.mark.parametrize(
    "make", [KVCache, lambda: RotatingKVCache(300), lambda: ChunkedKVCache(300)]
)
def test_plain_caches_grow_by_steps_from_wherever_they_are(make):
    """They are cut to their tokens, and then a step is added: up to 255 tokens above whole steps."""
    draw, chunk = random.Random(1), 90
    first = make()
    read(first, 1)
    (shape,) = shapes_of([first])
    for _ in range(60):
        cache, tokens = make(), 0
        while tokens < 900:
            count = draw.choice((1, 1, 2, chunk, draw.randrange(1, chunk + 1)))
            read(cache, count)
            tokens += count
            assert cache.nbytes <= shape.bytes(tokens, chunk)


@pytest.mark.parametrize("listed", [False, True])
def test_padding_does_not_add_up_over_the_parts_of_prompts(listed):
    """At the end of a system prompt, a question or its thinking, a row is padded to the longest."""
    chunk, batch = 400, BatchKVCache([0, 0])
    first = KVCache()
    read(first, 1)
    (shape,) = shapes_of([first])
    each = [0, 0]
    for lengths in ((400, 10), (10, 400), (5, 5), (400, 5), (5, 400)):
        padding = [max(lengths) - n for n in lengths]
        batch.prepare(lengths=lengths, right_padding=padding)
        x = mx.zeros((2, 2, max(lengths), 8))
        batch.update_and_fetch(x, x)
        batch.finalize()
        cut_padding([CacheList(batch)] if listed else [batch])
        each = [a + b for a, b in zip(each, lengths, strict=True)]
        assert batch.nbytes <= 2 * shape.bytes(max(each), chunk, padded=True)
        assert batch.size() == max(each)


def read(cache, count: int) -> None:
    if isinstance(cache, ChunkedKVCache):
        cache.maybe_trim_front()
    x = mx.zeros((1, 2, count, 8))
    cache.update_and_fetch(x, x)
