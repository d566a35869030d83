"""What does not fit: a context that is full, memory that runs out, parts of prompts that would take too long."""

import logging
import random
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache
from scripted_models import ASK
from serving import (
    ENDLESS,
    LONG,
    asking,
    complete,
    get,
    held,
    post,
    read_prompts,
    refused,
    serving,
    settled,
    until,
)

from mlxkv.errors import UserError
from mlxkv.machine import footprint, machine_memory
from mlxkv.serve import engine
from mlxkv.serve.engine import Engine
from mlxkv.serve.options import ServeOptions
from mlxkv.serve.sessions import cut_padding, shapes_of

CHAT = "/v1/chat/completions"


def talk(turns: int) -> list[dict]:
    """A chat of so many turns of some 100 tokens each; the context has 2,048."""
    chat = [{"role": "system", "content": "Be brief."}]
    for i in range(turns):
        chat += [{"role": "user", "content": f"{i}: {LONG[:64]}"}]
        chat += [{"role": "assistant", "content": "So."}]
    return chat[:-1]


def test_the_oldest_turns_are_dropped_where_that_is_asked_for(server, change, monkeypatch):
    assert refused(server, 400, CHAT, messages=talk(24))["code"] == "context_length_exceeded"
    change(overflow="drop")
    prompts = read_prompts(server, monkeypatch)
    counts = (3, 24, 25, 40)
    found = [post(server, CHAT, messages=talk(n), max_tokens=8) for n in counts]
    dropped = [one["kv"]["dropped_messages"] for one in found]
    assert dropped[0] == 0 < dropped[1] == dropped[2] < dropped[3]
    for prompt, turns, count in zip(prompts, counts, dropped, strict=True):
        text = server.engine.tokenizer.decode(prompt.tokens)
        kept = [i for i in range(turns) if f"\n{i}: All work" in text]
        assert "Be brief." in text and kept == list(range(count // 2, turns))
    # The same turns are gone, so that the rest is found in the cache.
    assert found[2]["kv"]["cached_tokens"] > 1000
    alone = [{"role": "user", "content": "a" * 3000}]
    assert refused(server, 400, CHAT, messages=alone)["code"] == "context_length_exceeded"
    # A reply is shorter where turns were dropped for memory.
    memory = server.engine.memory
    monkeypatch.setattr(memory, "bound", memory.need(1000))
    reply = post(server, CHAT, messages=talk(24), max_tokens=700)
    assert reply["kv"]["dropped_messages"] > 0
    assert reply["usage"]["total_tokens"] <= memory.longest(1 << 20)


def test_a_reply_of_no_length_ends_where_the_model_ends_it(running, said):
    """Most clients name none: Open WebUI, aider, llm, LangChain. What does not fit is cut, not refused."""
    said[0] = "It rains. " * 120
    (choice,) = post(running, CHAT, messages=ASK)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (said[0], "stop")
    found = post(running, "/v1/responses", input=ASK)
    assert found["status"] == "completed" and found["output"][0]["content"][0]["text"] == said[0]


def test_a_reply_of_no_length_takes_what_memory_holds(model_folder):
    with serving(model_folder, kv="fp16", kv_memory="600KB") as server:
        most = get(server, "/v1/kv")["longest_tokens"]
        found = post(server, "/v1/completions", prompt="a", logit_bias={"257": -100})
        assert found["usage"]["total_tokens"] == most < 2000
        assert found["choices"][0]["finish_reason"] == "length"
        assert refused(server, 503, prompt="a", max_tokens=most)["code"] == "kv_memory"


def test_a_machine_without_memory_refuses_before_it_swaps(server, monkeypatch):
    complete(server, LONG, 2)
    assert settled(server)["sessions"]["count"] > 0
    taken = machine_memory()
    monkeypatch.setattr(engine, "used_memory", lambda: taken)
    error = refused(server, 503, prompt="a", max_tokens=2)
    assert error["code"] == "memory_busy" and "90% of this machine's memory" in error["message"]
    found = settled(server)  # what was kept has made room, and nothing is promised
    assert found["sessions"]["count"] == 0
    taken = 0
    assert complete(server, "a", 2)["usage"]["completion_tokens"] == 2
    assert get(server, "/v1/kv")["memory"]["process_bytes"] > 1 << 20
    assert 1 << 20 < footprint() < machine_memory()


def test_freed_buffers_go_before_what_is_kept(server, monkeypatch):
    complete(server, LONG, 2)
    settled(server)
    taken = [machine_memory()]
    monkeypatch.setattr(engine, "used_memory", lambda: taken[0])
    monkeypatch.setattr(engine.mx, "clear_cache", lambda: taken.__setitem__(0, 0))
    assert complete(server, "a", 2)["usage"]["completion_tokens"] == 2
    assert complete(server, LONG, 2)["kv"]["cached_tokens"] > 0


def test_what_is_promised_to_others_counts(server, monkeypatch):
    """Requests that are admitted together, before their caches grow, do not pass the ceiling together."""
    settled(server)
    mine = server.engine
    need = mine.memory.need(1000)
    free = machine_memory() - int(engine.CEILING * machine_memory()) + need * 3 // 2
    monkeypatch.setattr(engine, "used_memory", lambda: machine_memory() - free)
    for key, fits in (("first", True), ("second", False)):
        mine.memory.promise(key, 1000)
        assert (mine._excess() <= 0) == fits
    mine.memory.release_all()


def test_freed_buffers_are_bounded(model_folder):
    with serving(model_folder, kv_memory="4GB"):
        assert mx.set_cache_limit(1 << 30) == 2 << 30


@pytest.mark.parametrize("heads", [4, 32, 8 * 32])
def test_parts_of_prompts_shrink_with_depth(heads):
    sizes = [engine.chunk_of(2048, heads, depth) for depth in range(0, 1 << 17, 1 << 12)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] >= 1024
    for depth, size in zip(range(0, 1 << 17, 1 << 12), sizes, strict=True):
        assert size * heads * (depth + size) <= engine.DISPATCH or size == engine.LEAST_CHUNK
    assert engine.chunk_of(2048, 4, 1 << 16) == 2048 > engine.chunk_of(2048, 32, 1 << 16)


def test_a_prompt_is_read_in_parts_that_fit(server, monkeypatch):
    want = complete(server, LONG, 8)["choices"][0]["text"]
    monkeypatch.setattr(engine, "DISPATCH", 1 << 14)
    assert complete(server, LONG, 8, cache_salt="x")["choices"][0]["text"] == want
    sizes, step = [], server.engine.step
    monkeypatch.setattr(
        server.engine,
        "step",
        lambda: (step(), sizes.append(server.engine._generator.prefill_step_size)),
    )
    complete(server, LONG, 1, cache_salt="y")
    assert min(sizes) == engine.LEAST_CHUNK < max(sizes)


def test_parts_of_prompts_take_a_second_while_others_stream(server, monkeypatch):
    """By a clock on which a token takes 5 ms, and one of a prompt that is behind 600 others 10."""
    want = complete(server, 4 * LONG, 8)["choices"][0]["text"]
    mine, step = server.engine, server.engine.step
    now, seconds, sizes = [0.0], [], []
    clock = SimpleNamespace(monotonic=lambda: now[0], time_ns=time.time_ns)
    monkeypatch.setattr(engine, "time", clock)

    def steps():
        begun = len(mine.jobs) > 1  # beside the stream
        step()
        is_deep = any(job.cache_tokens > 600 for job in mine.jobs.values())
        took = mine._read * (0.01 if is_deep else 0.005)
        now[0] += took
        if begun and mine._read:
            seconds.append(took)
            sizes.append(mine._read)

    monkeypatch.setattr(mine, "step", steps)
    complete(server, 4 * LONG, 8, cache_salt="alone")
    assert not sizes and now[0] > 5
    with asking(server, **ENDLESS, stream=True):
        until(lambda: any(not job.is_reading for job in mine.jobs.values()))
        found = complete(server, 4 * LONG, 8, cache_salt="beside")
    settled(server)
    assert found["choices"][0]["text"] == want
    assert max(seconds) < 1.5 and sizes[0] == engine.LEAST_CHUNK and max(sizes) == 128


def test_a_line_of_the_log_for_each_reply(model_folder, caplog):
    with caplog.at_level(logging.INFO, "mlxkv"), serving(model_folder) as server:
        complete(server, "abc", 2)
        complete(server, "abc", 2)
        refused(server, 400, prompt="abc", temperature=-1)
        get(server, "/v1/kv")
    lines = [line.rpartition(", ")[0] for line in caplog.messages if "/v1/" in line]
    want = "POST /v1/completions 200: 3 tokens in, {} reused, 2 out"
    assert lines == [want.format(0), want.format(2), "POST /v1/completions 400"]


def test_choices_are_named():
    for wrong in ({"overflow": "wrap"}, {"log_level": "all"}):
        with pytest.raises(UserError, match=r"^\[--[a-z-]+\] unknown; got .*choose from"):
            ServeOptions(**wrong)


# -- caches never take more than was promised, and /v1/kv says how many tokens may be

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


@pytest.mark.parametrize(("folder", "kv"), [("model_folder", "int4"), ("gemma_folder", "fp16")])
def test_a_server_keeps_what_it_promised(folder, kv, request, used):
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
            assert cache.nbytes <= shape.allocated(tokens, chunk, most=True)


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
        assert batch.nbytes <= 2 * shape.allocated(max(each), chunk, most=True, padded=True)
        assert batch.size() == max(each)


def read(cache, count: int) -> None:
    if isinstance(cache, ChunkedKVCache):
        cache.maybe_trim_front()
    x = mx.zeros((1, 2, count, 8))
    cache.update_and_fetch(x, x)
