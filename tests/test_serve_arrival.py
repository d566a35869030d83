"""Clients that take their time: a request has its time to arrive, and no more lines than there are."""

from __future__ import annotations

import logging
import socket
import time
from json import dumps, loads

import pytest
from serving import complete, get, send, serving, text_of
from test_serve import ENDLESS, settled
from test_serve_faults import head

from mlxkv.serve import arrival
from mlxkv.serve.engine import Batches
from mlxkv.serve.handler import Handler

SECONDS = 0.6


@pytest.fixture
def server(model_folder, monkeypatch):
    monkeypatch.setattr(Handler, "timeout", SECONDS)
    monkeypatch.setattr(arrival, "GRACE", 0.05)
    with serving(model_folder, max_requests=1) as running:  # four lines
        yield running


def trickle(line: socket.socket, data: bytes, pause: float) -> bytes:
    """Byte after byte, until something comes back."""
    line.settimeout(pause)
    found = b""
    for i in range(len(data)):
        try:
            line.sendall(data[i : i + 1])
            if not (found := line.recv(1 << 16)):
                break
            line.settimeout(5)
            while part := line.recv(1 << 16):
                found += part
            break
        except TimeoutError:
            continue
        except ConnectionError:  # perhaps behind a reply, which a byte on its way has crossed
            break
    return found


@pytest.mark.parametrize("of", ["head", "body"])
def test_a_request_that_trickles_in_is_closed_in_time(server, caplog, of):
    """Before, every byte gave it another 30 seconds."""
    data = head(dumps({"prompt": "a" * 500}).encode())
    start = 0 if of == "head" else data.index(b"\r\n\r\n") + 9
    began = time.monotonic()
    with (
        caplog.at_level(logging.WARNING),
        socket.create_connection(server.server_address) as line,
    ):
        line.sendall(data[:start])
        found = trickle(line, data[start:], 0.05)
    # All bytes would take half a minute.
    assert SECONDS < time.monotonic() - began < 12 * SECONDS
    assert found.startswith(b"HTTP/1.0 408 ")
    error = loads(found.split(b"\r\n\r\n", 1)[1])["error"]
    assert error["code"] == "timeout" and error["message"].startswith("[request] did not arrive in")
    (said,) = [one.message for one in caplog.records]
    assert said.startswith("[request] did not arrive in 0.6 s; got") and "127.0.0.1" in said
    assert get(server, "/health") == {"status": "ok"}


def test_a_large_body_over_a_slow_line_has_its_time(server, monkeypatch):
    monkeypatch.setattr(arrival, "PACE", 1 << 10)
    body = dumps({"prompt": "a", "max_tokens": 2}).encode() + b" " * 6000
    data, start = head(body), time.monotonic()
    with socket.create_connection(server.server_address) as line:
        for at in range(0, len(data), 500):
            line.sendall(data[at : at + 500])
            time.sleep(0.08)
        assert time.monotonic() - start > 1.5 * SECONDS
        assert line.recv(12) == b"HTTP/1.0 200"


def test_streams_and_lines_that_wait_have_their_time(server, monkeypatch):
    """Replies may take longer than requests; a line may be opened before it is used."""
    with socket.create_connection(server.server_address) as waits:
        time.sleep(0.1 * SECONDS)
        waits.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n")
        assert waits.recv(12) == b"HTTP/1.0 200"
    plain = Batches.next

    def slow(self):
        time.sleep(0.01)
        return plain(self)

    monkeypatch.setattr(Batches, "next", slow)
    start, body = time.monotonic(), ENDLESS | {"stream": True, "max_tokens": 150}
    status, _, data = send(server, "POST", "/v1/completions", body)
    assert status == 200 and data.endswith(b"data: [DONE]\n\n")
    assert time.monotonic() - start > 2 * SECONDS


def test_requests_that_never_arrive_take_nobodys_place(server, caplog):
    """All lines are taken by them, again and again."""
    want = text_of(complete(server, "x", 4))
    with caplog.at_level(logging.WARNING):
        lines = []
        for _ in range(3):
            lines += [socket.create_connection(server.server_address) for _ in range(4)]
            for line in lines[-4:]:
                line.sendall(b"GET / HTTP/1.1\r\nHost: ")
            time.sleep(0.1)
            assert text_of(complete(server, "x", 4)) == want
        for line in lines:
            line.close()
    full = [one.message for one in caplog.records if "all 4 connections" in one.message]
    assert 1 <= len(full) <= 12
    settled(server)


def test_whoever_has_arrived_keeps_the_place(monkeypatch):
    monkeypatch.setattr(arrival, "GRACE", 0.05)
    monkeypatch.setattr(arrival, "LEAVE", 0.01)
    door = arrival.Door(2)
    pairs = [socket.socketpair() for _ in range(4)]
    try:
        first, second, third, fourth = (pair[0] for pair in pairs)
        assert door.enter(first) and door.enter(second)
        assert not door.enter(third)  # nobody is late yet
        time.sleep(0.06)
        door.arrived(first), door.arrived(second)
        assert not door.enter(third)
        door.leave(second)
        assert door.enter(third)
        time.sleep(0.06)
        assert not door.enter(fourth)  # the thread of the third has yet to go
        assert third.recv(1) == b""  # it was shut
        door.leave(third)
        assert door.enter(fourth)
    finally:
        for one in (end for pair in pairs for end in pair):
            one.close()
