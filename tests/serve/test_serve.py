"""`mlxkv serve` over HTTP: replies, streams, counts, refusals and failures."""

import json
import socket
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from request_bodies import BODIES
from scripted_models import ASK
from serving import (
    ENDLESS,
    LONG,
    asking,
    complete,
    get,
    held,
    post,
    refused,
    send,
    serving,
    settled,
    text_of,
    until,
)

from mlxkv.serve.engine import Engine
from mlxkv.serve.models import Metrics, metrics_page
from mlxkv.serve.request import Job


def test_a_chat_and_what_it_counts(server):
    messages = [{"role": "user", "content": [{"type": "text", "text": LONG}]}]
    found = post(server, "/v1/chat/completions", messages=messages, max_tokens=9)
    choice, usage, kv = found["choices"][0], found["usage"], found["kv"]
    assert choice["finish_reason"] == "length" and choice["message"]["role"] == "assistant"
    assert usage["completion_tokens"] == 9
    assert kv["tokens"] == usage["total_tokens"]
    assert kv["preset"] == "int4" and kv["exact_tokens"] == 192 < kv["tokens"]
    assert 0 < kv["bytes"] < kv["allocated_bytes"]
    assert kv["bytes_fp16"] == 2 * 2 * 2 * 64 * kv["tokens"]  # not rounded up
    short = post(
        server, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=2
    )
    assert short["kv"]["note"] == "nothing compressed yet (exact up to 192 tokens)"
    assert short["kv"]["ratio"] is short["kv"]["bits_per_value"] is None
    again = post(server, "/v1/chat/completions", messages=messages, max_tokens=9)
    assert again["choices"] == found["choices"]
    assert again["kv"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1
    total = settled(server)
    memory = total["memory"]
    assert memory["promised_bytes"] == 0 < memory["bytes"]
    assert memory["bytes"] <= memory["sessions_allocated_bytes_apart"]
    assert total["sessions"]["hits"] >= 1


def test_a_prompt_that_is_all_in_the_cache(server):
    """The model has to read at least one token again."""
    first = text_of(complete(server, LONG + "x", 4))
    prompt = LONG + "x" + first
    assert text_of(complete(server, prompt, 4)) == text_of(complete(server, prompt, 4))
    assert get(server, "/health") == {"status": "ok"}


def test_many_at_once_get_what_each_gets_alone(server, model_folder):
    prompts = [f"{i} " + LONG[: 40 * i] for i in range(8)]
    with serving(model_folder, batch=1) as other:
        alone = [text_of(complete(other, p, 5 + i)) for i, p in enumerate(prompts)]
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(complete, server, p, 5 + i) for i, p in enumerate(prompts)]
        assert [text_of(job.result()) for job in jobs] == alone


def test_models_metrics_page(server):
    (model,) = get(server, "/v1/models")["data"]
    assert get(server, "/v1/models/" + model["id"]) == model
    assert send(server, "GET", "/v1/models/other")[0] == 404
    complete(server, "hi", 2)
    lines = send(server, "GET", "/metrics")[2].decode().splitlines()
    numbers = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    label = f'model="{model["id"]}"'
    assert float(numbers[f"mlxkv_generated_tokens_total{{{label}}}"]) >= 2
    assert float(numbers[f'mlxkv_first_token_seconds_bucket{{{label},le="+Inf"}}']) >= 1
    assert f"mlxkv_kv_bound_bytes{{{label}}}" in numbers
    assert 'mlxkv_responses_total{status="200"}' in numbers
    for path, kind in (
        ("/", "text/html"),
        ("/page/main.js", "text/javascript"),
        ("/page/style.css", "text/css"),
        ("/page/vendor/purify.es.mjs", "text/javascript"),
    ):
        status, headers, data = send(server, "GET", path)
        assert status == 200 and data and headers["Content-Type"].startswith(kind)
        assert "default-src 'self'" in headers["Content-Security-Policy"]


def test_layers_are_accounted_for(server):
    found = get(server, "/v1/kv")
    assert found["kv"] == "int4" and found["batched"]
    assert [layer["compressed"] for layer in found["layers"]] == [True, True]
    assert all(layer["kernel"] and layer["reason"] for layer in found["layers"])


def test_buckets_count_what_took_no_longer():
    metrics = Metrics()
    for name, seconds in (("first_token", 0.05), ("duration", 0.2), ("duration", 7.0)):
        metrics.took(name, seconds)
    document = {"safe_tokens": 1, "memory": {}, "sessions": {}, "disk": None}
    page = metrics_page(Counter(), {}, {'ä "b"': (metrics, document)})
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if line[0] != "#")
    model = 'model="ä \\"b\\""'  # Prometheus refuses a page with \\u00e4

    def bucket(name: str, bound: str) -> int:
        return int(lines[f'mlxkv_{name}_seconds_bucket{{{model},le="{bound}"}}'])

    bounds = ("0.05", "0.1", "0.25", "5", "10", "+Inf")
    assert [bucket("duration", bound) for bound in bounds] == [0, 0, 1, 1, 2, 2]
    assert [bucket("first_token", bound) for bound in bounds] == [1] * 6
    assert float(lines[f"mlxkv_duration_seconds_sum{{{model}}}"]) == 7.2
    assert lines[f"mlxkv_first_token_seconds_count{{{model}}}"] == "1"


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_closes_its_writing_side_gets_its_reply(server, streamed):
    """As `nc -N` does, and some proxies."""
    with asking(server, prompt="abc", max_tokens=5, stream=streamed) as line:
        line.shutdown(socket.SHUT_WR)
        data = b"".join(iter(lambda: line.recv(1 << 16), b""))
    assert b"HTTP/1.1 200" in data and data.endswith((b"0\r\n\r\n", b"}"))


# -- what is refused


def test_paths_and_lengths(server):
    assert send(server, "GET", "/etc/passwd")[0] == 404
    assert send(server, "GET", "/page/style.css/../../engine.py")[0] == 404
    assert send(server, "POST", "/v1/kv", {})[0] == 404
    for method, path, allowed in (
        ("GET", "/v1/completions", "POST"),
        ("OPTIONS", "/v1/chat/completions", "POST"),
        ("OPTIONS", "/v1/kv", "GET, HEAD"),
        ("OPTIONS", "/page/style.css", "GET, HEAD"),
    ):
        status, headers, data = send(server, method, path)
        assert (status, headers["Allow"]) == (405, allowed)
        assert data.endswith(b"HEAD") or f"takes {allowed}".encode() in data
    status, _, data = send(server, "POST", "/v1/completions", b" " * (65 << 10))
    assert status == 413 and "at most 65536" in json.loads(data)["error"]["message"]


def test_what_this_server_does_not_have(server):
    assert "no such model" in refused(server, 404, prompt="a", model="../../etc")["message"]
    for field, value in {"adapters": "/tmp", "draft_model": "x", "n": 2, "echo": True}.items():
        assert refused(server, 400, prompt="a", **{field: value})["message"].startswith(
            f"[{field}]"
        )
    long = refused(server, 400, prompt="a" * 2048)
    assert long["code"] == "context_length_exceeded"
    # In the words by which clients know it: LangChain the first ones, LiteLLM the last.
    assert "prompt is too long: 2048 tokens > 2048 maximum" in long["message"]
    assert "this model's maximum context length is 2048" in long["message"]
    assert len(text_of(complete(server, "a" * 2045, 50)).encode()) <= 12  # 3 tokens are left


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_hangs_up_frees_its_place(server, streamed):
    before = server.loaded_model.metrics.counts["cut_off"]
    with asking(server, **ENDLESS, stream=streamed) as line:
        assert not streamed or line.recv(10).startswith(b"HTTP")
        until(lambda: server.engine.jobs)
        (job,) = server.engine.jobs.values()
    settled(server)
    until(lambda: server.loaded_model.metrics.counts["cut_off"] == before + 1)
    assert job.cache_tokens < ENDLESS["max_tokens"]  # nothing more is written


def test_who_leaves_while_waiting_is_forgotten(model_folder, monkeypatch):
    """A request behind one that is served alone: no reply is written after its client has left."""
    with serving(model_folder) as server, ThreadPoolExecutor(1) as pool:
        server.engine.is_batchable = False
        with held(monkeypatch, Job, "put"):
            first = pool.submit(complete, server, "a", 3)
            until(lambda: server.engine.memory.promised)  # it is taken up
            with asking(server, prompt=LONG, max_tokens=1500):
                until(lambda: server.models.active == 2)
            until(lambda: server.loaded_model.metrics.counts["cut_off"] == 1)
        assert first.result()["usage"]["completion_tokens"] == 3
        assert settled(server)["sessions"]["lookups"] == 1


def test_who_gives_up_while_its_session_is_read_gets_no_reply(server, change, monkeypatch):
    change(timeout=0.1)
    server.engine.sessions.forget()
    with held(monkeypatch, server.engine.sessions, "fetch"):
        assert refused(server, 504, **ENDLESS)["code"] == "timeout"
    assert settled(server)["sessions"]["count"] == 0


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(BODIES, st.booleans())
def test_any_body_gets_an_answer(server, request_, chat):
    path = "/v1/chat/completions" if chat else "/v1/completions"
    status, _, data = send(server, "POST", path, request_ | {"max_tokens": 2, "stream": False})
    assert status in (200, 400, 404)
    assert set(json.loads(data)) >= ({"choices", "kv"} if status == 200 else {"error"})
    assert get(server, "/health") == {"status": "ok"}


def test_a_fault_is_answered_and_the_next_request_is_served(server, monkeypatch):
    loaded = server.loaded_model.loaded
    want = text_of(complete(server, "before", 5))
    real = type(loaded.model).__call__

    def broken(self, *args, **kwargs):
        raise RuntimeError("[malloc] unable to allocate")

    monkeypatch.setattr(type(loaded.model), "__call__", broken)
    assert "unable to allocate" in refused(server, 500, prompt=LONG + "?")["message"]
    monkeypatch.setattr(type(loaded.model), "__call__", real)
    assert get(server, "/health") == {"status": "ok"}
    assert text_of(complete(server, "before", 5)) == want
    assert settled(server)["memory"]["promised_bytes"] == 0


def test_a_fault_before_a_prompt_is_read_gives_its_memory_back(server, monkeypatch):
    def broken(*_) -> int:
        raise OSError("the memory cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(server.engine, "_excess", broken)
        assert "cannot be read" in refused(server, 500, prompt="a")["message"]
    assert get(server, "/v1/kv")["memory"]["promised_bytes"] == 0


def test_a_reply_that_takes_too_long(server, change, monkeypatch):
    plain = Engine.step

    def slow(self):
        time.sleep(0.01)
        return plain(self)

    change(timeout=0.2)
    monkeypatch.setattr(Engine, "step", slow)
    assert refused(server, 504, **ENDLESS)["code"] == "timeout"
    settled(server)


def test_memory_is_wired_where_that_is_asked_for(model_folder, monkeypatch):
    calls = []
    module = sys.modules["mlx_lm.generate"]
    monkeypatch.setattr(
        module, "maybe_set_recommended_wired_limit", lambda: calls.append("set") or 1
    )
    monkeypatch.setattr("mlx.core.set_wired_limit", calls.append)
    for asked in (False, True):
        with serving(model_folder, wired_limit=asked) as server:
            complete(server, "a", 2)
        assert calls == (["set", 1] if asked else [])


def test_too_many_requests(server, change, monkeypatch):
    change(max_requests=1)
    with ThreadPoolExecutor(1) as pool, held(monkeypatch, Engine, "step") as go:
        first = pool.submit(complete, server, "a", 2)
        until(lambda: server.models.active)
        status, headers, _ = send(server, "POST", "/v1/completions", {"prompt": "b"})
        assert status == 429 and headers["Retry-After"] == "1"
        go.set()
        assert first.result()["usage"]["completion_tokens"] == 2


def test_a_prompt_of_tokens(server):
    """It says what the text of these tokens says, streamed or not."""
    tokens = server.engine.tokenizer.encode("Hello there")
    texts = [
        text_of(complete(server, prompt, tokens=5)) for prompt in ("Hello there", tokens, [tokens])
    ]
    assert texts[0] == texts[1] == texts[2] != text_of(complete(server, tokens[:3], tokens=5))


def test_twenty_alternatives_of_a_token(server):
    for path, asked in (
        ("/v1/chat/completions", {"messages": ASK, "logprobs": True, "top_logprobs": 20}),
        ("/v1/completions", {"prompt": "a", "logprobs": 20}),
    ):
        (choice,) = post(server, path, max_tokens=2, **asked)["choices"]
        found = choice["logprobs"]
        tops = found.get("top_logprobs") or [one["top_logprobs"] for one in found["content"]]
        assert [len(top) for top in tops] == [20] * len(tops)


def test_openais_own_client(openai, server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list().data
        ask = {"model": model.id, "messages": [{"role": "user", "content": "Tell me"}]}
        whole = client.chat.completions.create(**ask, max_tokens=7)
        assert whole.usage.completion_tokens == 7 and whole.kv["preset"] == "int4"
        more = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = client.chat.completions.create(**ask, **more, max_tokens=7)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
        assert last.usage.total_tokens == whole.usage.total_tokens
        with pytest.raises(openai.BadRequestError, match=r"\[temperature\]"):
            client.chat.completions.create(**ask, temperature=-1)
        with pytest.raises(openai.NotFoundError, match="no such model"):
            client.completions.create(model="other", prompt="a")
