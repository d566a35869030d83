"""`mlxkv serve` as two processes with half of the kv heads each: in step, with one process's replies."""

import gc
import json
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Barrier, local
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from random_models import write_model
from ring import environments
from serving import (
    ENDLESS,
    LONG,
    PATIENCE,
    ThreadWorker,
    asking,
    complete,
    refused,
    serving,
    settled,
    text_of,
    until,
    workers,
)
from small_models import TINY

from mlxkv.errors import MachineError, UserError
from mlxkv.loading.load import load
from mlxkv.serve import engine, ranks
from mlxkv.serve.options import ServeOptions
from mlxkv.serve.ranks import Ranks
from mlxkv.serve.request import Job, Prompt
from mlxkv.serve.run import Server
from mlxkv.serve.sessions import CacheShape, Disk, Memory

PROMPTS = [f"{i} " + LONG[: 60 * i] for i in range(5)]
LONG_REPLY = ENDLESS | {"prompt": LONG}


@contextmanager
def two_processes(folder: Path, *options: str):
    """Starts both. Yields rank 0's address, and the processes."""
    command = (sys.executable, "-m", "mlxkv", "serve", "--model", str(folder), "--port", "0")
    running = []
    for i, env in enumerate(environments(folder)):
        with (folder / f"{i}.txt").open("w") as said:
            running.append(subprocess.Popen([*command, *options], env=env, stderr=said))

    def port():
        over = [one.poll() for one in running] != [None, None]
        said = (folder / "0.txt").read_text()
        assert not over, said + (folder / "1.txt").read_text()
        return re.search(r"chat: http://127\.0\.0\.1:(\d+)/", said)

    try:
        until(port)
        yield SimpleNamespace(server_address=("127.0.0.1", int(port()[1])), running=running)
    finally:
        for one in running:
            one.kill()
            one.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "model"
    return write_model(path, num_attention_heads=4, num_key_value_heads=2)


@pytest.mark.slow
def test_two_processes_reply_as_one(folder, tmp_path):
    with serving(folder) as one:
        alone = [text_of(complete(one, prompt, 12 + i)) for i, prompt in enumerate(PROMPTS)]
        turns = [text_of(complete(one, LONG, 9))]
        turns += [text_of(complete(one, LONG + turns[0] + "And then?", 9))]
        drawn = text_of(complete(one, "abc", 16, temperature=1, seed=1))
        whole = complete(one, LONG, 9)["kv"]["bytes"]
        stop = [turns[0][4:6]]
        short = complete(one, LONG, 9, stop=stop)
    options = ("--kv-memory", "1400KB", "--kv-disk", str(tmp_path))
    with two_processes(folder, *options) as both:
        with ThreadPoolExecutor(8) as pool:
            jobs = [pool.submit(complete, both, p, 12 + i) for i, p in enumerate(PROMPTS)]
            assert [text_of(job.result()) for job in jobs] == alone
        with ExitStack() as readers:
            for _ in range(2):
                readers.enter_context(reading(both))
            assert refused(both, 503, **LONG_REPLY)["code"] == "kv_memory_busy"
        with reading(both, seed=1, temperature=1):
            pass
        found = settled(both)
        assert found["processes"] == 2 and found["sessions"]["evicted"] > 0
        assert found["memory"]["allocated_bytes"] <= found["memory"]["bound_bytes"] == 1400 << 10

        assert text_of(complete(both, LONG, 9)) == turns[0]
        second = complete(both, LONG + turns[0] + "And then?", 9)
        assert text_of(second) == turns[1] and second["kv"]["cached_tokens"] == len(LONG)
        assert complete(both, LONG, 9)["kv"]["bytes"] * 2 == whole
        assert text_of(complete(both, "abc", 16, temperature=1, seed=1)) == drawn

        assert refused(both, 400, prompt="")["code"] == "invalid_value"
        again = complete(both, PROMPTS[4], 16)  # long ago evicted
        assert text_of(again) == alone[4] and again["kv"]["cached_tokens"] > 100
        cut = complete(both, LONG, 9, stop=stop)
        assert text_of(cut) == text_of(short) == turns[0][: turns[0].find(stop[0])]
        assert cut["usage"]["completion_tokens"] == short["usage"]["completion_tokens"] < 9
        both.running[1].send_signal(signal.SIGTERM)  # either may be asked
        assert [process.wait(PATIENCE) for process in both.running] == [0, 0]
    files = [{path.name for path in tmp_path.glob(f"{i}-of-2/*/*")} for i in (1, 2)]
    assert files[0] == files[1] != set()
    assert "Traceback" not in (folder / "0.txt").read_text() + (folder / "1.txt").read_text()


@contextmanager
def reading(server, **more):
    """A client that hangs up in the middle of its reply."""
    with asking(server, **LONG_REPLY | more | {"stream": True}) as line:
        assert line.recv(12).endswith(b" 200")
        yield


# -- two processes' words, in two threads


class Pair(Ranks):
    """One of two threads that meet at a barrier, where processes would sum."""

    def __init__(self, rank: int, barrier: Barrier, table: dict):
        self.rank, self.size, self.many, self.group = rank, 2, True, None
        self.ending = False
        self.barrier, self.table = barrier, table

    def _meet(self, thing) -> list:
        self.barrier.wait(PATIENCE)
        self.table[self.rank] = thing
        self.barrier.wait(PATIENCE)
        return [self.table[0], self.table[1]]

    def share(self, thing):
        return json.loads(self._meet(json.dumps(thing))[0])

    def _all(self, number):
        return self._meet(int(number))


def both_do(*works) -> list:
    """Run two works, each with its Ranks. Returns what they return or raise."""
    barrier, table = Barrier(2), {}
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(work, Pair(i, barrier, table)) for i, work in enumerate(works)]
        return [job.exception(PATIENCE) or job.result() for job in jobs]


def test_a_model_that_one_process_cannot_load():
    def broken():
        raise UserError("[load] no such file; got a/b")

    errors = both_do(lambda r: r.start(lambda: "a"), lambda r: r.start(broken))
    assert isinstance(errors[0], MachineError) and isinstance(errors[1], UserError)
    errors = both_do(lambda r: r.start(lambda: "a"), lambda r: r.start(lambda: "b"))
    assert all("another model" in str(error) for error in errors)
    assert both_do(*[lambda r: r.start(lambda: "a")] * 2) == [None, None]


def test_a_folder_that_one_process_cannot_open(tmp_path, loaded):
    (tmp_path / "2-of-2").write_text("a file")
    errors = both_do(*[lambda r: r.run_on_all(lambda: Disk(tmp_path, 1 << 20, loaded, r))] * 2)
    assert isinstance(errors[0], MachineError) and "--kv-disk" in str(errors[1])
    (tmp_path / "2-of-2").unlink()
    errors.clear()  # they hold what rank 0 had opened
    gc.collect()
    disks = both_do(*[lambda r: r.run_on_all(lambda: Disk(tmp_path, 1 << 20, loaded, r))] * 2)
    assert [disk.entries for disk in disks] == [[], []]
    errors = both_do(*[lambda r: r.run_on_all(lambda: Disk(tmp_path, 1 << 20, loaded, r))] * 2)
    assert all("another server keeps its sessions there" in str(error) for error in errors)


@pytest.mark.parametrize(("ceiling", "kept", "limit"), [(0.9, (300, 200), 50), (0.8, (0, 0), 0)])
def test_machines_of_two_sizes_agree_on_what_is_too_much(ceiling, kept, limit, monkeypatch):
    """The first has room. The second has it, too, once sessions are gone, or has no session."""
    machine, nbytes, limits = local(), list(kept), []
    monkeypatch.setattr(engine, "CEILING", ceiling)
    monkeypatch.setattr(engine, "machine_memory", lambda: machine.size)
    monkeypatch.setattr(engine, "used_memory", lambda: 800 + nbytes[machine.rank])

    def work(ranks):
        machine.rank, machine.size = ranks.rank, (4000, 1000)[ranks.rank]

        def shrink(limit: int) -> None:
            limits.append(limit)
            nbytes[ranks.rank] = min(nbytes[ranks.rank], limit)

        server = object.__new__(engine.Engine)
        server.ranks, server.kv_allocated = ranks, 0
        server.loaded = SimpleNamespace(context=None)
        server.options = SimpleNamespace(overflow="refuse")
        server.memory = Memory(1000, [CacheShape(fixed=50)], 1)
        server.sessions = SimpleNamespace(nbytes=kept[ranks.rank], shrink=shrink)
        request = SimpleNamespace(max_tokens=5, shorten=False, chat=False)
        return server._reserve(Job(request, Prompt([], [])), 5)

    results = both_do(work, work)
    assert limits == [limit] * 2
    if any(kept):
        assert results == [5, 5]
    else:
        assert [error.code for error in results] == ["memory_busy"] * 2


def test_a_session_that_one_process_has_lost(tmp_path, loaded):
    """It is not used; one that both have is."""
    caches = make_prompt_cache(loaded.model)
    loaded.model(mx.array([[1, 2, 3]]), cache=caches)
    for place in ("1-of-2", "2-of-2"):
        disk = Disk(tmp_path / place, 1 << 30, loaded)
        for first in (1, 4, 7):
            disk.save([first, 2, 3], caches)
        disk.close()
    disk.entries[1].path.unlink()
    disk.entries[2].path.write_bytes(disk.entries[2].path.read_bytes()[:-1] + b"?")

    def look(ranks: Ranks) -> list:
        disk = Disk(tmp_path, 1 << 30, loaded, ranks)
        found = [disk.nearest([first, 2, 3, 4]) for first in (1, 4, 7)]
        read = [disk.load(entry) is not None for entry, _ in found if entry]
        return [[shared for _, shared in found], read, [e.tokens for e in disk.entries]]

    assert both_do(look, look) == [[[3, 0, 3], [True, False], [[1, 2, 3]]]] * 2


class Solo(Ranks):
    """One process that behaves like several."""

    def __init__(self):
        self.rank, self.size, self.many, self.group = 0, 2, True, None
        self.ending = self.ended = False
        self.heard = time.monotonic()

    def share(self, thing):
        return thing

    def _all(self, number):
        return [int(number)]

    def tokens(self, drawn):
        return drawn


@pytest.mark.parametrize("batched", [True, False])
def test_a_fault_is_the_end_of_all(batched, folder, monkeypatch):
    """The others are no longer in step. MLX's ring raises when a process was lost."""
    monkeypatch.setattr(engine, "Ranks", Solo)
    with workers(ThreadWorker):
        server = Server(ServeOptions(model=str(folder), port=0))
    server.engine.is_batchable = batched
    with ThreadPoolExecutor(2) as pool:
        end = pool.submit(server.serve)
        want = text_of(complete(server, "before", 5))
        assert text_of(complete(server, "before", 5)) == want

        def broken(self, *args, **kwargs):
            raise RuntimeError("[ring] connection to a peer was lost")

        monkeypatch.setattr(type(server.loaded_model.loaded.model), "__call__", broken)
        assert "a peer was lost" in refused(server, 500, prompt=LONG)["message"]
        assert "a peer was lost" in str(end.exception(PATIENCE))
    assert not server.engine.is_healthy


def test_silence_is_the_end(monkeypatch, capsys):
    codes, alone = [], Solo()
    monkeypatch.setattr(ranks.os, "_exit", codes.append)
    alone.heard -= 40
    alone.watch(60)
    assert codes == []
    alone.watch(5)  # a part of a prompt may take longer than a request may: 30 seconds
    said = capsys.readouterr().err
    assert codes == [1] and "nothing came from the other processes for 30 s" in said
    alone.end()
    alone.watch(60)
    assert codes == [1]
    alone.heard -= 40
    alone.watch(60)
    assert codes == [1, 1]


def test_models_that_cannot_be_spread(model_folder):
    two = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    with pytest.raises(UserError, match="gemma3_text for 2 processes"):
        load(TINY, group=two)
    with pytest.raises(UserError, match="kv heads cannot be shared evenly; got 1 of them"):
        load(str(model_folder), group=two)
