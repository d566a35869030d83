"""The end of a server: replies under way have a while, clients are told, signals break nothing."""

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from types import SimpleNamespace

import pytest
from serving import (
    ENDLESS,
    LONG,
    ThreadWorker,
    asking,
    complete,
    get,
    send,
    serving,
    until,
    workers,
)

from mlxkv.options import PARENT
from mlxkv.serve import run
from mlxkv.serve.options import ServeOptions
from mlxkv.serve.run import Server


def test_a_log_that_nobody_reads_changes_no_exit_code(model_folder):
    """`mlxkv serve 2>&1 | head -1`."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    command = [sys.executable, "-m", "mlxkv", "serve", "-m", model_folder, "--port", str(port)]
    streams = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    with subprocess.Popen(command, **streams, text=True) as process:
        process.stderr.readline()
        process.stderr.close()

        def answers() -> bool:
            assert process.poll() is None
            place = SimpleNamespace(server_address=("127.0.0.1", port))
            try:
                body = {"prompt": "a", "max_tokens": 1}
                return send(place, "POST", "/v1/completions", body)[0] == 200
            except ConnectionRefusedError:
                return False

        until(answers)
        process.terminate()
        assert process.wait() == 0


def test_a_server_ends_with_who_started_it(model_folder, monkeypatch):
    """`mlxkv launch` names itself; whoever is the parent of a server then, it is not that."""
    monkeypatch.setenv(PARENT, str(os.getppid()))
    with serving(model_folder) as server:
        complete(server, "a", 1)
        monkeypatch.setattr(os, "getppid", lambda: 1)
        until(lambda: not server.engine.is_healthy, 30)


@pytest.fixture(params=[True, False], ids=["batched", "alone"])
def server(model_folder, tmp_path, request):
    with workers(ThreadWorker):
        made = Server(ServeOptions(model=str(model_folder), port=0, kv_disk=str(tmp_path)))
    made.engine.is_batchable = request.param
    thread = Thread(target=made.serve)
    thread.start()
    made.thread = thread
    try:
        yield made
    finally:
        end(made, hurry=True)


def end(server: Server, hurry: bool = False) -> float:
    """End a server; return how long that took."""
    start = time.monotonic()
    for _ in range(1 + hurry):
        server.stop()
    server.thread.join()
    return time.monotonic() - start


def test_replies_under_way_are_written_to_the_end(server, monkeypatch):
    monkeypatch.setattr(run, "GRACE", 60)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(complete, server, LONG, 60, logit_bias={"257": -100})
        until(lambda: server.models.active)
        end(server)
        assert job.result()["usage"]["completion_tokens"] == 60
    assert server.engine.sessions.entries == [] and server.engine.sessions.disk.saved > 0


def test_clients_are_told_when_their_time_is_over(server, monkeypatch):
    monkeypatch.setattr(run, "GRACE", 0.1)
    complete(server, LONG, 2)
    with asking(server, **ENDLESS, stream=True) as stream, ThreadPoolExecutor(1) as pool:
        assert b"200" in stream.recv(64)  # first: alone, the other would go on to its end before
        whole = pool.submit(send, server, "POST", "/v1/completions", ENDLESS)
        until(lambda: server.models.active == 2)
        assert end(server) < 30
        got = b""
        while part := stream.recv(1 << 16):
            got += part
        status, _, data = whole.result()
    error = json.loads(got.decode().split("data: ")[-1].split("\n")[0])["error"]
    assert error["code"] == "ending" and b"[DONE]" not in got
    assert (status, json.loads(data)["error"]["code"]) == (503, "ending")
    assert server.engine.sessions.disk.saved > 0


def test_a_second_signal_is_in_a_hurry(server, monkeypatch):
    monkeypatch.setattr(run, "GRACE", 60)
    with asking(server, **ENDLESS, stream=True) as stream:
        assert b"200" in stream.recv(64)
        assert end(server, hurry=True) < 30


def test_who_comes_too_late_is_told(server, monkeypatch):
    """A request of a connection that was there before the end."""
    server.engine.is_ending = True
    status, _, data = send(server, "POST", "/v1/completions", {"prompt": "a"})
    assert (status, json.loads(data)["error"]["code"]) == (503, "ending")
    server.engine.is_ending = False
    assert get(server, "/health") == {"status": "ok"}

    def late(job):  # between its look and its request, which nobody takes up
        server.engine.is_ending = True

    monkeypatch.setattr(server.engine.requests, "put", late)
    status, _, data = send(server, "POST", "/v1/completions", {"prompt": "a"})
    assert (status, json.loads(data)["error"]["code"]) == (503, "ending")
    server.engine.is_ending = False
