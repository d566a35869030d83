"""The size of caches is known before they exist, and bounded; sessions go to disk and come back."""

import logging
import os
import signal
import stat
import subprocess
import sys
import time
from types import SimpleNamespace

import crafted_files
import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from random_models import config_of, random_model, save, tokens, write_tokenizer
from serving import LONG, complete, get, post, refused, send, serving, text_of
from small_caches import maker, memory_of, read
from small_models import TINY

from mlxkv.errors import UserError
from mlxkv.loading.attach import attach
from mlxkv.loading.load import load
from mlxkv.serve import engine
from mlxkv.serve.engine import Engine
from mlxkv.serve.options import ServeOptions
from mlxkv.serve.refusals import Refused
from mlxkv.serve.sessions import Disk, Memory, Sessions, shapes_of


@pytest.mark.parametrize(
    ("family", "kv"), [("qwen3_next", "int4"), ("qwen3_next", "fp16"), ("gemma3_text", "fp16")]
)
def test_a_system_prompt_is_read_once(family, kv, tmp_path):
    """Also where no cache can be cut back to its end: states, and windows that have moved on."""
    every = {"vocab_size": 258}  # the tokenizer's: other rows of a table of embeddings are anything
    folder = save(tmp_path, random_model(family, **every), config_of(family) | every)
    write_tokenizer(folder)

    def ask(server, question: str, **more) -> dict:
        messages = [
            {"role": "system", "content": "Be kind. " * 40},
            {"role": "user", "content": question},
        ]
        body = {"messages": messages, "max_tokens": 4, "temperature": 0} | more
        return post(server, "/v1/chat/completions", **body)

    with serving(folder, kv=kv) as server:
        first, second = ask(server, "Who?"), ask(server, "Where to?")
        fresh = ask(server, "Where to?", cache_salt="another")
        own = ask(server, "Whence?", cache_salt="another")
    assert first["kv"]["cached_tokens"] == fresh["kv"]["cached_tokens"] == 0
    assert second["kv"]["cached_tokens"] == own["kv"]["cached_tokens"] > 300
    if kv == "fp16":  # codes of a page that was exact a moment ago may tip a random model
        assert second["choices"][0]["message"] == fresh["choices"][0]["message"]


def test_promises_are_kept_within_the_bound():
    memory = memory_of(random_model("llama"))
    memory.bound = 3 * memory.need(200)
    for key in range(3):
        memory.promise(key, 200)
    with pytest.raises(Refused, match="promised to other requests") as found:
        memory.promise(3, 200)
    assert found.value.status == 503 and found.value.retry
    memory.release(1)
    memory.promise(3, 200)
    with pytest.raises(Refused, match="the bound is") as found:
        memory.promise(4, 2000)
    assert found.value.details["need_bytes"] == memory.need(2000) > memory.bound


@pytest.mark.parametrize("kv", ["int4", "kivi-int2", "fp16"])
def test_what_is_cut_back_takes_what_a_new_one_takes(kv):
    """A request that shares the first half of a session does not hold memory for the other half."""
    model = random_model("llama")
    attach(model, kv)
    memory = memory_of(model)
    sessions = Sessions(memory, lambda: make_prompt_cache(model))
    whole = tokens(1500).tolist()
    sessions.keep(whole, read(model, 1500))
    for count in (1400, 900, 800, 300, 60):
        cache, held = sessions.fetch([*whole[:count], 0])
        assert held == count
        assert {one.offset for one in cache} == {count}
        assert sum(one.nbytes for one in cache) <= memory.need(count + 1)


def test_mlx_lms_own_batches_pad_all_to_the_longest():
    model = random_model("llama")
    batched = memory_of(model, batched=True)
    lengths = (5, 900, 40)
    for key, count in enumerate(lengths):
        batched.promise(key, count)
    merged = [
        layer[0].merge(layer) for layer in zip(*(read(model, n) for n in lengths), strict=True)
    ]
    model(tokens(3)[:, None], cache=merged)
    assert sum(cache.nbytes for cache in merged) <= batched.promised
    batched.bound = batched.promised + batched.need(300)
    with pytest.raises(Refused, match="promised to other requests"):
        batched.promise(3, 40)  # which would be as long as the longest
    batched.release(1)
    batched.promise(3, 40)


def test_padding_of_prompts_that_are_read_together_is_set_aside():
    """The last token of one beside a whole part of another."""
    model, chunk = random_model("llama"), 700
    memory = Memory(1 << 40, shapes_of(read(model, 1)), chunk, batched=True)
    memory.promise("long", 900)
    memory.promise("new", 1 + chunk)
    rows = zip(read(model, 899), read(model, 1), strict=True)
    merged = [layer[0].merge(layer) for layer in rows]
    for cache in merged:
        cache.prepare(lengths=[1, chunk], right_padding=[chunk - 1, 0])
    model(mx.stack([tokens(chunk)] * 2), cache=merged)
    assert sum(cache.nbytes for cache in merged) <= memory.promised


def test_the_least_recently_used_go_to_disk_and_come_back(small, tmp_path):
    memory = memory_of(small.model)
    disk = Disk(tmp_path, 1 << 30, small)
    sessions = Sessions(memory, maker(small), disk)
    prompts = [[i] * 30 + list(range(170)) for i in range(4)]
    for prompt in prompts:
        sessions.keep(prompt, read(small.model, 200))
    each = sessions.nbytes // 4
    memory.bound = 2 * each
    sessions.shrink()
    assert len(sessions.entries) == 2 and len(disk.entries) == 2 and sessions.nbytes <= memory.bound
    cache, count = sessions.fetch(prompts[0] + [1, 2])
    assert count == 200 and {c.offset for c in cache} == {200} and disk.found == 1
    cache, count = sessions.fetch(prompts[1][:100] + [259] * 9)
    assert 0 < count <= 100 and {c.offset for c in cache} == {count}
    assert sessions.fetch([200, 201])[1] == 0
    assert (sessions.counts["hits"], sessions.counts["lookups"]) == (2, 3)
    sessions.close()
    assert len(sessions.entries) == 0
    again = Disk(tmp_path, 1 << 30, small)
    assert sorted(entry.tokens for entry in again.entries) == sorted(prompts)
    assert Disk(tmp_path, 1 << 30, load(TINY, "int4")).entries == []  # of another model


def test_a_longer_session_takes_the_place_of_its_start_on_disk(small, tmp_path):
    disk = Disk(tmp_path, 1 << 30, small)
    disk.save([1, 2, 3], read(small.model, 3))
    disk.save([1, 2, 3, 4, 5], read(small.model, 5))
    assert [entry.tokens for entry in disk.entries] == [[1, 2, 3, 4, 5]]
    assert len(list(disk.folder.iterdir())) == 1
    disk.limit = disk.entries[0].nbytes * 2 + 9
    for i in range(3):
        disk.save([7 + i, 2], read(small.model, 5))
    assert [entry.tokens[0] for entry in disk.entries] == [8, 9]
    assert disk.nbytes <= disk.limit


@pytest.mark.parametrize("kv", ["int4", "fp16"])
def test_a_limit_that_holds_no_request_is_refused_before_the_weights_are_read(
    model_folder, monkeypatch, kv
):
    monkeypatch.setattr(engine, "load", lambda *args, **options: pytest.fail("weights are read"))
    with pytest.raises(UserError, match="no room for a single short request; got 20KB; 64 tokens"):
        Engine(ServeOptions(model=[str(model_folder)], kv=kv, kv_memory="20KB")).wait_until_ready()


def test_a_server_within_its_bound(model_folder, tmp_path):
    """Sessions go to disk and come back with the same reply; what cannot fit is refused with numbers."""
    with serving(model_folder, kv_memory="340KB", kv_disk=str(tmp_path)) as server:
        first = [complete(server, f"{i}{LONG}", 6) for i in range(4)]
        found = get(server, "/v1/kv")
        assert found["memory"]["sessions_allocated_bytes"] <= 340 << 10
        assert found["disk"]["saved"] >= 1
        again = [complete(server, f"{i}{LONG}", 6) for i in range(4)]
        assert [text_of(x) for x in again] == [text_of(x) for x in first]
        assert all(x["kv"]["cached_tokens"] == len(LONG) for x in again)
        error = refused(server, 503, prompt="x" * 2000, max_tokens=500)
        assert error["need_bytes"] > error["kv_memory_bytes"] == 340 << 10
        assert error["code"] == "kv_memory" and get(server, "/health") == {"status": "ok"}
    with serving(model_folder, kv_memory="340KB", kv_disk=str(tmp_path)) as server:
        last = complete(server, f"3{LONG}", 6)
        assert text_of(last) == text_of(first[3]) and last["kv"]["cached_tokens"] == len(LONG)


@pytest.mark.slow
def test_killed_while_saving(model_folder, tmp_path):
    """kill -9 while sessions are saved: the next start finds whole ones or none. With few descriptors: mlx-lm
    asks for 4,096 as it is imported, which a container may not allow."""
    command = [
        "sh",
        "-c",
        'ulimit -n 1024; exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "mlxkv",
        "serve",
    ]
    command += ["--model", str(model_folder), "--port", "0"]
    command += ["--kv-memory", "440KB", "--kv-disk", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = iter(process.stderr.readline, "")
            url = next((line.split()[1] for line in said if line.startswith("chat: ")), None)
            assert url is not None  # it ended
            port = int(url.rstrip("/").rsplit(":", 1)[1])
            running = SimpleNamespace(server_address=("127.0.0.1", port))
            for i in range(3):
                assert complete(running, f"{i}{LONG}", 2)["usage"]["completion_tokens"] == 2
            process.send_signal(signal.SIGTERM)  # the rest is being saved
            time.sleep(0.01)
        finally:
            process.kill()
    with serving(model_folder, kv_memory="440KB", kv_disk=str(tmp_path)) as server:
        assert get(server, "/v1/kv")["disk"]["failed"] == 0
        assert send(server, "POST", "/v1/completions", {"prompt": f"0{LONG}"})[0] == 200
        assert get(server, "/v1/kv")["disk"]["failed"] == 0


# -- the folder of sessions: private, of one server, and not stopped by anything that lies in it

ROOM = 1 << 30


@pytest.fixture
def base(tmp_path):
    return tmp_path / "sessions"


@pytest.fixture(scope="module")
def good(small, tmp_path_factory) -> tuple[str, bytes]:
    """(name, bytes) of a session of 150 tokens."""
    disk = Disk(tmp_path_factory.mktemp("good"), ROOM, small)
    disk.save([3] * 150, read(small.model, 150))
    disk.close()
    return disk.entries[0].path.name, disk.entries[0].path.read_bytes()


def place(base, small):
    disk = Disk(base, ROOM, small)
    disk.close()
    return disk.folder


def test_what_it_writes_is_nobody_elses(small, base):
    disk = Disk(base / "of" / "mine", ROOM, small)
    disk.save([1] * 10, read(small.model, 10))
    paths = [base, base / "of", base / "of" / "mine", disk.folder, disk.entries[0].path]
    modes = [stat.S_IMODE(os.lstat(path).st_mode) for path in paths]
    assert modes == [0o700] * 4 + [0o600]


def test_folders_of_others_are_refused(small, base, tmp_path):
    folder = place(base, small)
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"\[--kv-disk\] is a link"):
        Disk(base, ROOM, small)
    folder.unlink()
    base.chmod(0o777)
    with pytest.raises(UserError, match=r"\[--kv-disk\] others may write"):
        Disk(base, ROOM, small)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"\[--kv-disk\] is a link"):
        Disk(tmp_path / "link", ROOM, small)
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_second_server_is_refused_until_the_first_has_ended(small, base):
    first = Disk(base, ROOM, small)
    with pytest.raises(UserError, match="another server keeps its sessions there"):
        Disk(base, ROOM, small)
    Disk(base, ROOM, load(str(small.path), "int8")).close()  # another preset has its own folder
    first.save([1] * 10, read(small.model, 10))
    sessions = Sessions(memory_of(small.model), maker(small), first)
    sessions.close()
    again = Disk(base, ROOM, small)
    assert [entry.tokens for entry in again.entries] == [[1] * 10]


def test_sessions_of_another_mlx_lm_lie_in_another_folder(small, base, monkeypatch):
    folder = place(base, small)
    monkeypatch.setattr("mlxkv.serve.sessions.version", lambda name: "99.1.2")
    other = place(base, small)
    monkeypatch.setattr("mlxkv.serve.sessions.version", lambda name: "99.1.3")
    assert place(base, small) == other != folder


def test_odd_files_do_not_stop_a_start(small, base, good, caplog):
    folder, (name, content) = place(base, small), good
    (folder / name).write_bytes(content)
    for i, (_, put) in enumerate(crafted_files.odd_files(folder, "odd.safetensors")):
        put()
        os.rename(folder / "odd.safetensors", folder / f"{i}.safetensors")
    (folder / f".draft{i}.safetensors").mkdir()
    (folder / ".x.safetensors").symlink_to("/dev/zero")
    (folder / "notes.txt").write_text("of the user")
    with caplog.at_level(logging.WARNING):
        disk = Disk(base, ROOM, small)
    assert [entry.path.name for entry in disk.entries] == [name]
    assert disk.failed == i + 1 == sum("left alone" in said for said in caplog.messages)
    assert (folder / "notes.txt").exists() and not (folder / ".x.safetensors").is_symlink()
    assert disk.load(disk.entries[0]) is not None


def test_crafted_files_cost_a_session_and_no_request(small, base, good):
    folder, (name, content) = place(base, small), good
    model = memory_of(small.model)
    for what, data in crafted_files.cases(content, every=18):
        (folder / name).write_bytes(data)
        disk = Disk(base, ROOM, small)
        sessions = Sessions(model, maker(small), disk)
        cache, count = sessions.fetch([3] * 160)
        assert count == 0 and all(one.empty() for one in cache), what
        assert disk.failed == 1 or not disk.entries[0].tokens, what
        sessions.keep([4] * 20, read(small.model, 20))
        assert sessions.fetch([4] * 21)[1] == 20
        disk.close()
        for path in folder.iterdir():
            path.unlink()


def test_a_bad_session_is_removed(small, base, good):
    folder, (name, content) = place(base, small), good
    crafted = crafted_files.Crafted(content)
    crafted.metadata["1.0"] = "nn"
    (folder / name).write_bytes(crafted.file())
    disk = Disk(base, ROOM, small)
    assert disk.load(disk.entries[0]) is None and disk.entries == []
    assert os.listdir(folder) == [] and disk.failed == 1
    disk.save([3] * 150, read(small.model, 150))  # it may come again
    assert disk.load(disk.entries[0]) is not None
    disk.entries[0].tokens = [5] * 150  # the file was replaced by another session
    assert disk.load(disk.entries[0]) is None


def test_windows_that_have_moved_on_keep_their_starts(gemma_folder, base):
    """A sliding layer cannot be cut back: the prompt alone is found again, not only with its reply."""
    loaded = load(str(gemma_folder), "int4")
    prompt = list(range(120))
    disk = Disk(base, ROOM, loaded)
    for names in (prompt[:-1], [*prompt, 7, 8, 9], [1, 2, 3], [1, 2, 3, 4]):
        cache = make_prompt_cache(loaded.model)
        loaded.model(mx.array([names]), cache=cache)
        disk.save(names, cache)
    assert sorted(len(entry.tokens) for entry in disk.entries) == [4, 119, 123]
    disk.close()
    for found in (disk, Disk(base, ROOM, loaded)):
        assert [entry.trims for entry in found.entries] == [False, False, True]
        entry, shared = found.nearest(prompt)
        assert (len(entry.tokens), shared) == (119, 119)
        assert found.nearest([*prompt, 7, 8, 9, 10])[1] == 123
        assert found.nearest([*prompt[:50], 5])[0] is None
        assert found.nearest([1, 2, 9])[1] == 2
    sessions = Sessions(memory_of(loaded.model), maker(loaded), found)
    assert sessions.fetch(prompt)[1] == len(prompt) - 1
