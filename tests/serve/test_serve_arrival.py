"""Slow clients: limits on the time of a request's arrival and on the number of connections."""

from __future__ import annotations

import logging
import socket
import time
from json import dumps, loads

import pytest
from serving import ENDLESS, PATIENCE, complete, get, raw_post, send, serving, settled, text_of

from mlxkv.serve.engine import Engine
from mlxkv.serve.http import wire

SECONDS = 0.4


@pytest.fixture(scope="module")
def server(model_folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "SECONDS", SECONDS)
        patch.setattr(wire, "LOOK", 0.05)
        with serving(model_folder, max_requests=1) as running:
            yield running


def trickle(line: socket.socket, data: bytes, pause: float) -> tuple[bytes, int]:
    """Send byte after byte until a reply comes. Returns it, and the index of the last byte."""
    line.settimeout(pause)
    found = b""
    for i in range(len(data)):
        try:
            line.sendall(data[i : i + 1])
            if not (found := line.recv(1 << 16)):
                break
            line.settimeout(PATIENCE)
            while part := line.recv(1 << 16):
                found += part
            break
        except TimeoutError:
            continue
        except ConnectionError:  # perhaps after a reply, if a byte was on its way meanwhile
            break
    return found, i


@pytest.mark.parametrize("of", ["head", "body"])
def test_a_request_that_trickles_in_is_closed_in_time(server, caplog, of):
    """A byte now and then does not give it another 30 seconds."""
    data = raw_post(dumps({"prompt": "a" * 500}).encode())
    start = 0 if of == "head" else data.index(b"\r\n\r\n") + 9
    began = time.monotonic()
    with (
        caplog.at_level(logging.WARNING),
        socket.create_connection(server.server_address) as line,
    ):
        line.sendall(data[:start])
        found, last = trickle(line, data[start:], 0.05)
    assert time.monotonic() - began > SECONDS
    assert start + last < len(data) - 1  # all bytes would take half a minute
    assert found.startswith(b"HTTP/1.1 408 ")
    error = loads(found.split(b"\r\n\r\n", 1)[1])["error"]
    assert error["code"] == "timeout" and error["message"].startswith("[request] did not arrive in")
    (said,) = [one.message for one in caplog.records]
    assert (
        said.startswith(f"[request] did not arrive in {SECONDS:g} s; got") and "127.0.0.1" in said
    )
    assert get(server, "/health") == {"status": "ok"}


def test_a_large_body_over_a_slow_line_has_its_time(server, monkeypatch):
    monkeypatch.setattr(wire, "PACE", 1 << 8)
    body = dumps({"prompt": "a", "max_tokens": 2}).encode() + b" " * 6000
    data, start = raw_post(body), time.monotonic()
    with socket.create_connection(server.server_address) as line:
        for at in range(0, len(data), 500):
            line.sendall(data[at : at + 500])
            time.sleep(0.05)
        assert time.monotonic() - start > 1.5 * SECONDS
        assert line.recv(12) == b"HTTP/1.1 200"


def test_streams_and_lines_that_wait_have_their_time(server, monkeypatch):
    """The limit is for requests, not for replies; browsers open connections before they use them."""
    with socket.create_connection(server.server_address) as waits:
        time.sleep(1.5 * SECONDS)
        waits.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n")
        assert waits.recv(12) == b"HTTP/1.1 200"
    plain = Engine.step

    def slow(self):
        time.sleep(0.2 * SECONDS)
        return plain(self)

    monkeypatch.setattr(Engine, "step", slow)
    start, body = time.monotonic(), ENDLESS | {"stream": True, "max_tokens": 8}
    status, _, data = send(server, "POST", "/v1/completions", body)
    assert status == 200 and data.endswith(b"data: [DONE]\n\n")
    assert time.monotonic() - start > 1.5 * SECONDS


def test_requests_that_never_arrive_take_nobodys_place(server, monkeypatch, caplog):
    """Though they take all connections, again and again."""
    want = text_of(complete(server, "x", 4))
    monkeypatch.setattr(wire, "GRACE", 0.05)
    monkeypatch.setattr(server.site.limits, "most", 4)
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
    full = [one.message for one in caplog.records if "4 connections" in one.message]
    assert len(full) == 1  # one line, however many
    settled(server)
