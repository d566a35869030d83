"""/v1/kv says how many tokens are safe here: by the rule that admits requests."""

from __future__ import annotations

import random

import pytest
from serving import ENDLESS, asking, complete, get, refused, serving, settled, until

from mlxkv.serve.caches.memory import CacheShape, Memory
from mlxkv.serve.refusals import Refused


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


def test_the_longest_is_the_longest():
    """For any sizes: what it says is promised, one token more is not."""
    draw = random.Random(0)
    for _ in range(100):
        shapes = [
            CacheShape(
                fixed=draw.choice((0, 999)),
                full=draw.choice((64, 512)),
                half=256,
                window=draw.choice((0, 0, 128)),
                rotates=draw.random() < 0.5,
            )
            for _ in range(3)
        ]
        bound = draw.randrange(1, 1 << 20)
        memory = Memory(bound, shapes, draw.choice((64, 512)), batched=draw.random() < 0.5)
        beside = draw.random() < 0.5
        if beside:
            try:
                memory.promise("other", draw.randrange(1, 1000))
            except Refused:
                beside = False
        most = memory.longest(5000, beside=True)
        if most:
            memory.promise("mine", most)
            memory.release("mine")
        if most < 5000:
            with pytest.raises(Refused):
                memory.promise("mine", most + 1)
