"""A server whose clients, disks, files and clocks fail."""

import errno
import os
import random
import resource
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from json import dumps

import pytest
from mlx_lm.sample_utils import apply_top_k
from serving import (
    LONG,
    PATIENCE,
    ThreadWorker,
    complete,
    raw_post,
    refused,
    settled,
    text_of,
    workers,
)
from small_caches import maker, memory_of, read

from mlxkv import files
from mlxkv.errors import MachineError
from mlxkv.serve import sampling
from mlxkv.serve.options import ServeOptions
from mlxkv.serve.run import Server
from mlxkv.serve.sessions import Disk, Sessions

# -- clients


def test_clients_that_hang_up_anywhere(server):
    """In the head, in the body, before the first token, in the middle: nothing is left behind, and a client
    that stays gets the same reply as alone."""
    want = text_of(complete(server, "still here", 40))
    draw = random.Random(1)

    def leave(i: int) -> None:
        body = dumps({"prompt": f"{i} {LONG}", "max_tokens": 300, "stream": True}).encode()
        with socket.create_connection(server.server_address) as line:
            data = raw_post(body, len(body) + 10 * (i % 4 == 1))
            line.sendall(data[: draw.randrange(1, len(data))] if i % 4 == 0 else data)
            for _ in range(draw.randrange(4) if i % 4 > 1 else 0):
                line.recv(200)

    with ThreadPoolExecutor(8) as pool:
        stays = pool.submit(complete, server, "still here", 40)
        list(pool.map(leave, range(16)))
        assert text_of(stays.result()) == want
    found = settled(server)
    assert found["memory"]["promised_bytes"] == 0 and not server.engine.jobs
    assert text_of(complete(server, "still here", 40)) == want


@pytest.mark.parametrize("more", [{}, {"seed": 1}], ids=("batched", "seed"))
def test_the_best_of_more_tokens_than_there_are(server, more):
    faults = server.engine.faults
    for top in (server.engine.vocabulary - 1, server.engine.vocabulary, 1 << 20):
        complete(server, "a", 3, temperature=1, top_k=top, **more)
    assert server.engine.faults == faults


def test_a_sampler_that_raises_leaves_the_next_one_its_random_numbers(server, monkeypatch):
    faults = server.engine.faults
    with monkeypatch.context() as patch:
        broken = partial(apply_top_k, top_k=1 << 20)  # while MLX traces it
        patch.setattr(sampling, "make_sampler", lambda *_, **__: broken)
        refused(server, 500, prompt="a", temperature=1, max_tokens=3)
    assert server.engine.faults == faults + 1
    complete(server, "a", 3, temperature=1)


def test_a_fault_that_clearing_up_repeats_ends_the_server(model_folder, monkeypatch):
    def fail(*args):
        raise RuntimeError("illegal memory access")

    with workers(ThreadWorker):
        server = Server(ServeOptions(model=[str(model_folder)], port=0))
    monkeypatch.setattr(server.engine, "step", fail)
    monkeypatch.setattr(server.engine.memory, "release_all", fail)
    with ThreadPoolExecutor() as pool:
        end = pool.submit(server.serve)
        assert "illegal memory access" in refused(server, 500, prompt="a")["message"]
        try:
            with pytest.raises(MachineError, match=r"for good: illegal memory access"):
                end.result(PATIENCE)
        finally:
            server.stop()


# -- disks


def test_a_disk_that_is_full(small, tmp_path):
    """A limit on the size of files cuts MLX's own writer short, as a full disk does."""
    disk = Disk(tmp_path, 1 << 30, small)
    disk.save([1] * 10, read(small.model, 10))
    (kept,) = disk.entries
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 100, 4096, 100_000):
        cache = read(small.model, 300)
        assert sum(c.nbytes for c in cache) > size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            disk.save([2] * 300, cache)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert disk.failed == 4 and disk.entries == [kept]
    assert [path.name for path in disk.folder.iterdir()] == [kept.path.name]
    disk.save([2] * 300, read(small.model, 300))  # there is room again
    assert len(disk.entries) == 2 and disk.load(disk.entries[1]) is not None


@pytest.mark.parametrize(
    ("where", "number"), [("fsync", errno.ENOSPC), ("replace", errno.EIO), ("utime", errno.EROFS)]
)
def test_a_disk_that_fails(small, tmp_path, monkeypatch, where, number):
    disk = Disk(tmp_path, 1 << 30, small)
    disk.save([1] * 10, read(small.model, 10))

    def fails(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, where, fails)
    disk.save([2] * 10, read(small.model, 10))
    assert (disk.failed, len(disk.entries)) == ((0, 2) if where == "utime" else (1, 1))
    assert not list(disk.folder.glob(".*"))
    assert disk.load(disk.entries[0]) is not None


def test_a_folder_that_goes_away(small, tmp_path):
    """Sessions are lost, requests are not."""
    disk = Disk(tmp_path, 1 << 30, small)
    memory = memory_of(small.model)
    sessions = Sessions(memory, maker(small), disk)
    for i in range(3):
        disk.save([i] * 10, read(small.model, 10))
    shutil.rmtree(disk.folder)
    assert sessions.fetch([0] * 12)[1] == 0
    disk.save([4] * 10, read(small.model, 10))
    disk.folder.write_text("a file now")
    assert sessions.fetch([1] * 12)[1] == 0
    sessions.keep([5] * 10, read(small.model, 10))
    sessions.close()
    disk.limit = 0
    disk._bound()
    assert disk.entries == [] and disk.failed == 4


# -- clocks


def test_clocks_that_jump(server, small, tmp_path, monkeypatch):
    """Time limits use a clock that only goes forward; files may have any date."""
    want = text_of(complete(server, "what time is it", 20))
    real, jumps = time.time, random.Random(2)
    monkeypatch.setattr(time, "time", lambda: real() + jumps.uniform(-1e9, 1e9))
    assert text_of(complete(server, "what time is it?", 20, stream=False))
    assert text_of(complete(server, "what time is it", 20)) == want
    monkeypatch.undo()
    disk = Disk(tmp_path, 1 << 30, small)
    for i, date in enumerate((-1e9, 2e10, 0)):
        disk.save([i] * 10, read(small.model, 10))
        os.utime(disk.entries[-1].path, (date, date))
    disk.close()
    again = Disk(tmp_path, 1 << 30, small)
    assert [entry.tokens[0] for entry in again.entries] == [0, 2, 1]
    assert all(again.load(entry) for entry in list(again.entries))
