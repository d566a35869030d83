"""What does not fit: a context that is full, memory that runs out, parts of prompts that would take too long."""

from __future__ import annotations

import logging

import mlx.core as mx
import pytest
from serving import LONG, complete, get, post, read_prompts, refused, serving, settled

from mlxkv.errors import UserError
from mlxkv.machine import footprint, machine_memory
from mlxkv.serve import engine
from mlxkv.serve.options import ServeOptions

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


def test_a_line_of_the_log_for_each_reply(server, caplog):
    with caplog.at_level(logging.INFO, "mlxkv"):
        complete(server, "abc", 2, user="log")
        complete(server, "abc", 2, user="log")
        refused(server, 400, prompt="abc", temperature=-1)
        get(server, "/v1/kv")
    lines = [line.rpartition(", ")[0] for line in caplog.messages if "/v1/" in line]
    want = "POST /v1/completions 200: 3 tokens in, {} reused, 2 out"
    assert lines == [want.format(0), want.format(2), "POST /v1/completions 400"]


def test_choices_are_named():
    for wrong in ({"overflow": "wrap"}, {"log_level": "all"}):
        with pytest.raises(UserError, match=r"^\[--[a-z-]+\] unknown; got .*choose from"):
            ServeOptions(**wrong)
