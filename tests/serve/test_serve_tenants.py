"""Prompt caches belong to whoever asked: nobody finds another's, in memory, on disk or in numbers."""

import gc
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from patience import PATIENCE
from random_models import tokens
from serving import LONG, get, post, send, serving
from small_caches import maker, memory_of, read

from mlxkv.machine import machine_memory
from mlxkv.serve import engine
from mlxkv.serve.http.app import tenant
from mlxkv.serve.sessions import BlockStore, Disk, Sessions

KEYS = ["operator", "one", "two"]


def test_who_is_who():
    asked = [(None, "", ""), ("a", "", ""), ("b", "", ""), (None, "a", ""), (None, "", "a")]
    asked += [("a", "b", ""), ("a", "", "b"), ("ab", "", ""), (None, "ab", ""), (None, '", "', "")]
    names = [tenant(*one) for one in asked]
    assert len(set(names)) == len(asked) and names[0] == ""
    assert all(len(name) == 32 and name.isalnum() for name in names[1:])
    assert tenant("a", "b", "c") == tenant("a", "b", "c")


def test_sessions_are_found_by_their_tenant_alone(small, tmp_path):
    memory, names = memory_of(small.model), tokens(300).tolist()
    disk = Disk(tmp_path, 1 << 30, small)
    sessions = Sessions(memory, maker(small), disk)

    def found(whose: str) -> int:
        return sessions.fetch([*names, 1, 2], whose)[1]

    sessions.keep(names, read(small.model, 300), "a")
    assert [found(whose) for whose in ("a", "b", "")] == [300, 0, 0]
    sessions.keep(names, read(small.model, 300))  # nobody's
    assert sessions.block_store.saved == 0
    assert [found(whose) for whose in ("a", "b", "")] == [300, 0, 300]
    sessions.shrink(-1)
    assert sessions.entries == []
    assert sorted(entry.tenant for entry in disk.entries) == ["", "a"]
    assert [found(whose) for whose in ("b", "a", "")] == [0, 300, 300]
    disk.close()
    again = Disk(tmp_path, 1 << 30, small)  # after a restart
    assert sorted(entry.tenant for entry in again.entries) == ["", "a"]
    assert [again.nearest(names, whose)[1] for whose in ("b", "a", "")] == [0, 300, 300]
    again.save(names + [1], read(small.model, 301), "a")  # stands for the shorter one of its own
    assert sorted(len(entry.tokens) for entry in again.entries) == [300, 301]


def test_what_two_tenants_have_in_common_is_stored_twice(small):
    store, names = BlockStore(), tokens(900).tolist()
    one, other, again = (read(small.model, 900) for _ in range(3))
    store.put(names, one, "a")
    store.put(names, other, "b")
    assert store.saved == 0
    store.put(names, again, "b")
    assert store.saved > 0
    del other, again
    gc.collect()
    assert store.saved == 0


@pytest.fixture(scope="module", params=[True, False], ids=["batched", "alone"])
def server(model_folder, request):
    with serving(model_folder, api_key=KEYS) as running:
        running.engine.is_batchable = request.param
        yield running


def ask(server, key: str, prompt: str = LONG, **more) -> dict:
    """A reply's numbers, without those of time."""
    body = {"prompt": prompt, "max_tokens": 3, **more}
    found = post(server, "/v1/completions", {"Authorization": f"Bearer {key}"}, **body)
    assert found["kv"]["cached_tokens"] == found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return {"usage": found["usage"], "kv": found["kv"]}


def cached(*asked, **more) -> int:
    return ask(*asked, **more)["kv"]["cached_tokens"]


def test_keys_users_and_salts_share_nothing(server):
    first = ask(server, "one")
    assert first["kv"]["cached_tokens"] == 0
    for other in ({"key": "two"}, {"key": "one", "user": "u"}, {"key": "one", "cache_salt": "u"}):
        assert ask(server, **other) == first  # bytes and counts as if nobody had asked
        assert cached(server, **other) == len(LONG) - 1
    assert cached(server, "one") == len(LONG) - 1
    assert cached(server, "one", user="v") == 0


def test_a_chats_prompt_is_its_keys_too(server):
    """A prompt of several segments is kept segment by segment."""
    body = {"messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "a"}]}

    def found(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        reply = post(server, "/v1/chat/completions", headers, **body, max_tokens=1)
        return reply["kv"]["cached_tokens"]

    assert [found("one"), found("two")] == [0, 0]
    body["messages"][1]["content"] = "b"
    assert found("one") > len(LONG) and found("one") > 0 and found("two") > len(LONG)


def test_who_asks_beside_others_reads_the_same_numbers(server):
    alone = ask(server, "one", "x" + LONG, user="alone")
    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(ask, server, "one", "x" + LONG, user=f"{i}") for i in range(6)]
        assert [job.result() for job in jobs] == [alone] * 6


def test_what_is_refused_tells_nobody_what_others_were_promised(server, monkeypatch):
    """Of the cache's memory, and of the machine's."""
    memory = server.engine.memory
    monkeypatch.setattr(memory, "bound", memory.need(2000))

    def refusal(key: str) -> dict:
        body = {"prompt": "a", "max_tokens": 1000}
        headers = {"Authorization": f"Bearer {key}"}
        status, _, data = send(server, "POST", "/v1/completions", body, headers)
        assert status == 503
        return json.loads(data)["error"]

    found: dict[str, list[dict]] = {key: [] for key in KEYS}
    for count in (1500, 1900):
        memory.release("other")
        memory.promise("other", count)
        for key in KEYS:
            found[key].append(refusal(key))
    memory.release("other")
    for key in KEYS:
        both = found[key]
        is_operator = key == "operator"
        assert both[0]["code"] == "kv_memory_busy" and both[0]["need_bytes"]
        assert is_operator == (both[0] != both[1]) == ("promised_bytes" in both[0])
    for taken in (machine_memory(), machine_memory() + (5 << 30)):
        monkeypatch.setattr(engine, "used_memory", lambda taken=taken: taken)
        for key in KEYS:
            found[key].append(refusal(key))
    for key in KEYS:
        both = found[key][2:]
        assert both[0]["code"] == "memory_busy" and (both[0] != both[1]) == (key == "operator")


def test_numbers_of_all_are_for_the_first_key(server):
    ask(server, "two")
    for _ in range(10 * PATIENCE):  # a reply has ended before its cache is kept
        whole = get(server, "/v1/kv", Authorization="Bearer operator")
        if whole["sessions"]["count"]:
            break
        time.sleep(0.1)
    assert whole["sessions"]["count"] > 0 and "bytes" in whole["memory"]
    assert whole["safe_tokens"] == whole["longest_tokens"]  # nobody was promised any
    own = get(server, "/v1/kv", Authorization="Bearer one")
    assert own["memory"] == {"bound_bytes": whole["memory"]["bound_bytes"]}
    assert not {"sessions", "disk", "active_requests", "safe_tokens"} & set(own)
    assert own["longest_tokens"] == whole["longest_tokens"]
    ask(server, "two", "another prompt")
    assert get(server, "/v1/kv", Authorization="Bearer one") == own
    for key, status in (("one", 403), ("operator", 200), ("none", 401)):
        headers = {"Authorization": f"Bearer {key}"}
        assert send(server, "GET", "/metrics", headers=headers)[0] == status
