"""What the caches in use take never exceeds what was promised to their requests."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache
from serving import complete, serving
from test_serve import settled

from mlxkv.serve.engine import Batches
from mlxkv.serve.memory import cut_padding, shapes_of

TEXT = "All work and no play makes Jack a dull boy. " * 40


@pytest.fixture
def used(monkeypatch) -> list[tuple[int, int]]:
    """Bytes in use after each step of a server's batch, and bytes promised before it, when those that
    end in it still had theirs."""
    found: list[tuple[int, int]] = []
    plain = Batches.next

    def next_(self):
        before = self.engine.memory.promised
        out = plain(self)
        found.append((self.prompt_cache_nbytes, before))
        return out

    monkeypatch.setattr(Batches, "next", next_)
    return found


@pytest.mark.parametrize("kv", ["fp16", "int4"])
@pytest.mark.parametrize("folder", ["model_folder", "gemma_folder"])
def test_a_server_keeps_what_it_promised(kv, folder, request, used):
    """Many lengths at once, beginnings that are kept, replies that end at different times."""
    draw = random.Random(kv)
    asked = []
    for i in range(28):
        start, size = draw.choice((0, 0, 7, i)), round(4 * 400 ** draw.random())
        asked.append((TEXT[start : start + size], draw.choice((1, 9, 60))))
    with serving(request.getfixturevalue(folder), kv=kv, prefill_step=100) as server:
        with ThreadPoolExecutor(7) as pool:
            jobs = [pool.submit(complete, server, *one) for one in asked]
            assert all(job.result()["choices"] for job in jobs)
        assert settled(server)["memory"]["active_bytes"] == 0
    assert len(used) > 100
    assert all(taken <= promised for taken, promised in used)


@pytest.mark.parametrize("kv", ["fp16", "int4"])
def test_short_ends_beside_long_beginnings(model_folder, kv, used, monkeypatch):
    """One goes on from what is kept, others are read from their start: mlx-lm's batches pad the former by
    a chunk of the latter."""
    with serving(model_folder, kv=kv, prefill_step=400) as server:
        complete(server, TEXT[:1000], 1)
        fetch = server.engine.sessions.fetch_nearest_cache

        def slow(*args):  # so that all are taken up together
            time.sleep(0.1)
            return fetch(*args)

        monkeypatch.setattr(server.engine.sessions, "fetch_nearest_cache", slow)
        used.clear()
        prompts = [TEXT[:1004] + "?", *(f"{i}{TEXT[:size]}" for i, size in enumerate((410, 820)))]
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda prompt: complete(server, prompt, 1), prompts))
    assert len(used) > 2 and all(taken <= promised for taken, promised in used)


@pytest.mark.parametrize(
    "make", [KVCache, lambda: RotatingKVCache(300), lambda: ChunkedKVCache(300)]
)
def test_plain_caches_grow_by_steps_from_wherever_they_are(make):
    """Up to 255 tokens more than whole steps: they are cut to their tokens, then a step is added."""
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
    """System prompt, question, thinking: at the end of each, a row is padded to what others read."""
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
