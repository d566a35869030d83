"""Connections without a model: what is read as a request, what is refused, and who is cut off."""

import asyncio
import json
import logging
import socket
import time
from contextlib import contextmanager
from http.client import HTTPResponse
from threading import Event, Thread

import pytest
from serving import until
from starlette.requests import Request
from starlette.responses import Response

from mlxkv.serve.http import app, connection
from mlxkv.serve.http.app import Keys, RequestGuard, body_of
from mlxkv.serve.options import ServeOptions

PATIENCE = 20.0
LIMIT = 1 << 16
HOST = b"Host: localhost\r\n"
GET = b"GET /x HTTP/1.1\r\n" + HOST + b"\r\n"
LAST = b"GET /x HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"


class Echo:
    """Replies with the target and body of a request; /wait waits for `go`, /large is 32 MB."""

    def __init__(self):
        self.go, self.stopping = Event(), False
        self.limits = connection.Limits()
        self.limits.body = LIMIT
        guard = RequestGuard(ServeOptions(), Keys(), self.limits, self.answer)
        self.socket = connection.listen("127.0.0.1", 0)
        self.server_address = self.socket.getsockname()
        self.http_server = connection.HTTPServer(
            guard, self.limits, lambda: self.stopping, self.end
        )

    @property
    def connections(self) -> list:
        return list(self.http_server.server_state.connections)

    @property
    def busy(self) -> int:
        """Connections whose request is complete, and not answered."""
        cycles = [one.cycle for one in self.connections if one.cycle is not None]
        return sum(not (cycle.more_body or cycle.response_complete) for cycle in cycles)

    async def end(self):
        pass

    async def answer(self, scope, receive, send):
        request = Request(scope, receive)
        body, target = await body_of(request, self.limits), scope["path"].encode()
        if target == b"/wait":
            await asyncio.to_thread(self.go.wait)
        data = bytes(32 << 20) if target == b"/large" else target + b" " + body
        await Response(data)(scope, receive, send)


@contextmanager
def running(seconds: float = PATIENCE, most: int | None = None):
    with pytest.MonkeyPatch.context() as patch:
        for module in (app, connection):
            patch.setattr(module, "SECONDS", seconds)
        if most is not None:
            patch.setattr(connection, "connection_limit", lambda: most)
        server = Echo()
        thread = Thread(target=lambda: asyncio.run(server.http_server.serve([server.socket])))
        thread.start()
        try:
            yield server
        finally:
            server.go.set()
            server.stopping = True
            thread.join()


@pytest.fixture(scope="module")
def echo():
    with running() as server:
        yield server


def connect(server) -> socket.socket:
    return socket.create_connection(server.server_address[:2], timeout=PATIENCE)


def reply(line: socket.socket, method: str = "GET") -> tuple[int, bytes]:
    response = HTTPResponse(line, method=method)
    response.begin()
    return response.status, response.read()


def whole(line: socket.socket) -> bytes:
    """All that comes until the end."""
    return b"".join(iter(lambda: line.recv(1 << 16), b""))


def ended(line: socket.socket) -> bool:
    """Whether the server closes the connection, and says nothing more."""
    try:
        return not line.recv(1)
    except ConnectionError:
        return True


def post(body: bytes, *fields: bytes, target: bytes = b"/x", version: bytes = b"1.1") -> bytes:
    head = b"POST " + target + b" HTTP/" + version + b"\r\n" + HOST
    return head + b"".join(field + b"\r\n" for field in fields) + b"\r\n" + body


def sized(body: bytes) -> bytes:
    return post(body, b"Content-Length: %d" % len(body))


# -- requests


def test_small_replies_leave_at_once(echo):
    with connect(echo) as line:
        line.sendall(GET)
        assert reply(line) == (200, b"/x ")
        (one,) = [conn for conn in echo.connections if conn.client == line.getsockname()]
        there = one.transport.get_extra_info("socket")
        assert there.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_requests_that_come_at_once_are_answered_in_their_order(echo):
    chunked = post(b"2\r\nbc\r\n0\r\n\r\n", b"Transfer-Encoding: chunked")
    with connect(echo) as line:
        line.sendall(sized(b"a") + GET + chunked + LAST)
        parts = whole(line).split(b"HTTP/1.1 200")[1:]
    assert [part.split(b"\r\n\r\n")[1] for part in parts] == [b"/x a", b"/x ", b"/x bc", b"/x "]


def test_expectations(echo):
    """100 where a body is awaited; none where it will be refused."""
    with connect(echo) as line:
        line.sendall(post(b"", b"Content-Length: 1", b"Expect: 100-continue"))
        assert line.recv(100).startswith(b"HTTP/1.1 100")
        line.sendall(b"a")
        assert reply(line) == (200, b"/x a")
    with connect(echo) as line:
        line.sendall(post(b"", b"Content-Length: 999999", b"Expect: 100-continue"))
        assert line.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("coded", [False, True])
def test_a_body_of_one_byte_too_many_is_refused(echo, coded):
    """Announced, or in a chunk."""
    for size, status in ((LIMIT, 200), (LIMIT + 1, 413)):
        body = b"x" * size
        data = sized(body)
        if coded:
            data = post(b"%x\r\n%s\r\n0\r\n\r\n" % (size, body), b"Transfer-Encoding: chunked")
        with connect(echo) as line:
            line.sendall(data)
            assert reply(line)[0] == status


def test_a_refusal_is_read_by_a_client_that_goes_on_sending(echo):
    data = bytes(8 << 20)
    with connect(echo) as line:
        line.sendall(sized(data))
        assert reply(line)[0] == 413


CODED = post(b"", b"Transfer-Encoding: chunked")


def test_chunks_are_bounded(echo):
    """Few bytes of a body may be many on the wire."""
    for data, status in (
        (b"1\r\nx\r\n" * connection.CHUNKS, 200),
        (b"1\r\nx\r\n" * (connection.CHUNKS + 1), 413),
        (b"1;" + b"a" * 4000 + b"\r\nx\r\n", 200),
        ((b"1;" + b"a" * 4000 + b"\r\nx\r\n") * 100, 413),
    ):
        with connect(echo) as line:
            line.sendall(CODED + data + b"0\r\n\r\n")
            assert reply(line)[0] == status


def test_what_is_too_long_is_named(echo):
    for data, status in (
        (b"GET /" + b"a" * 70_000, 414),
        (GET[:-2] + b"A: " + b"b" * 80_000, 431),
        (CODED + b"1;" + b"a" * 70_000, 431),
        (CODED + b"0\r\nA: " + b"b" * 200_000, 431),
        (CODED + b"0\r\nA: b\r\n\r\n", 200),
    ):
        with connect(echo) as line:
            line.sendall(data)
            assert reply(line)[0] == status


@pytest.mark.parametrize(
    "data, status",
    [
        (CODED + b"1\r\nx\r\n" * connection.CHUNKS + b"0\r\n\r\n", 200),
        (GET[:-2] + b"a:\r\n" * 60_000 + b"\r\n", 431),
        (sized(b"a") + GET[:-2] + b"a:\r\n" * 60_000 + b"\r\n", 200),
        (CODED + b"0\r\n" + b"a:\r\n" * 60_000 + b"\r\n", 431),
    ],
    ids=["chunks", "fields", "fields of the next request", "trailers"],
)
def test_nobody_waits_for_what_another_one_sends_at_once(echo, monkeypatch, data, status):
    begun, turns, plain = [], [], connection.H11Connection.handle_events

    def timed(self):
        begun.append(self)
        start = time.thread_time()
        plain(self)
        turns.append(time.thread_time() - start)

    monkeypatch.setattr(connection.H11Connection, "handle_events", timed)
    with connect(echo) as line:
        line.sendall(data)
        assert reply(line)[0] == status
    until(lambda: len(turns) == len(begun))  # the last one replies before its end
    assert max(turns) < 0.04  # 0.004 s on a quiet machine; all at once 0.2 s


# -- clients that send no more, leave, or do nothing


def half_closed(server, data: bytes) -> socket.socket:
    line = connect(server)
    line.sendall(data)
    line.shutdown(socket.SHUT_WR)
    return line


def test_a_client_that_sends_no_more_reads_its_replies(echo):
    for data, replies in (
        (GET, [b"/x "]),
        (sized(b"a"), [b"/x a"]),
        (sized(b"a") + GET + sized(b"b"), [b"/x a", b"/x ", b"/x b"]),
        (CODED + b"1\r\nx\r\n" * 1000 + b"0\r\n\r\n", [b"/x " + b"x" * 1000]),
        (GET.replace(b"/x", b"/large"), [bytes(32 << 20)]),
    ):
        with half_closed(echo, data) as line:
            parts = whole(line).split(b"HTTP/1.1 200")[1:]
        assert [part.split(b"\r\n\r\n")[1].partition(b"HTTP/1.1")[0] for part in parts] == replies
    for data in (sized(b"ab")[:-1], GET[:-1], CODED + b"1\r\n"):
        with half_closed(echo, data) as line:
            assert reply(line)[0] == 400 and ended(line)
    with half_closed(echo, b"") as line:
        assert ended(line)


def test_a_client_that_has_gone_is_not_taken_for_one_that_sends_no_more():
    data = GET.replace(b"/x", b"/wait")
    with running() as server:
        with half_closed(server, data) as line:
            until(lambda: server.busy)
            time.sleep(0.1)  # several looks
            connect(server).close()
            with half_closed(server, data) as gone:
                until(lambda: server.busy == 2)
            assert gone.fileno() == -1
            until(lambda: server.busy == 1, PATIENCE)
            server.go.set()
            assert reply(line) == (200, b"/wait ") and ended(line)
        until(lambda: not server.connections)


def test_there_are_so_many_connections():
    with running(most=4) as server:
        lines = [connect(server) for _ in range(3)]
        for line in lines:
            line.sendall(GET.replace(b"/x", b"/wait"))
        until(lambda: server.busy == 3)
        with connect(server) as line:
            line.sendall(GET)
            assert reply(line)[0] == 503 and ended(line)
        server.go.set()
        for line in lines:
            assert reply(line) == (200, b"/wait ")
            line.close()


@pytest.mark.parametrize("data", [GET, sized(b"a" * 50)], ids=["head", "body"])
def test_late_requests_are_told(caplog, data):
    """A byte now and then does not give them another 30 seconds."""
    with running(seconds=0.15) as server, connect(server) as line, connect(server) as idle:
        line.settimeout(0.02)
        for i in range(len(data)):
            line.sendall(data[i : i + 1] if data is GET or i else data[:-50])
            try:
                begun = line.recv(1, socket.MSG_PEEK)
            except TimeoutError:
                continue
            break
        line.settimeout(PATIENCE)
        assert begun and i < len(data) - 1
        assert reply(line)[0] == 408 and ended(line)
        time.sleep(0.2)
        idle.sendall(GET)  # the limit is for requests, not for waiting
        assert reply(idle) == (200, b"/x ")
        idle.sendall(GET.replace(b"/x", b"/wait"))  # nor for replies
        time.sleep(0.3)
        server.go.set()
        assert reply(idle) == (200, b"/wait ")
    (message,) = (x.getMessage() for x in caplog.records if x.levelno >= logging.WARNING)
    assert "did not arrive in 0.15 s; got" in message and "from 127.0.0.1" in message


def test_a_late_body_is_told_in_the_words_of_its_api():
    late = sized(b"a" * 50)[:-50]
    for head, kind in (
        (late, None),
        (late.replace(b" /x ", b" /v1/messages "), "error"),
        (late.replace(b"\r\n", b"\r\nAnthropic-Version: 2023-06-01\r\n", 1), "error"),
    ):
        with running(seconds=0.15) as server, connect(server) as line:
            line.sendall(head)
            status, body = reply(line)
            assert status == 408 and json.loads(body).get("type") == kind


def test_a_large_body_over_a_slow_line_has_its_time(monkeypatch):
    monkeypatch.setattr(app, "PACE", 1 << 8)
    data = sized(bytes(6000))
    with running(seconds=0.2) as server, connect(server) as line:
        for at in range(0, len(data), 500):
            line.sendall(data[at : at + 500])
            time.sleep(0.03)
        assert reply(line)[0] == 200


def test_idle_connections_are_closed_in_the_end(monkeypatch):
    monkeypatch.setattr(connection, "IDLE", 0.1)
    with running() as server, connect(server) as line:
        line.sendall(GET)
        assert reply(line) == (200, b"/x ")
        assert ended(line)


def test_bodies_that_arrive_at_once_are_bounded(monkeypatch):
    monkeypatch.setattr(connection, "BODIES", 2)
    with running() as server:
        lines = [connect(server) for _ in range(5)]
        for line in lines:
            line.sendall(sized(bytes(LIMIT))[:-1])
            time.sleep(0.03)
        assert reply(lines[0])[0] == reply(lines[1])[0] == 503
        lines[-1].sendall(b"\0")
        assert reply(lines[-1])[0] == 200
        for line in lines:
            line.close()
        until(lambda: server.limits.bodies == {})


def test_a_client_that_does_not_read_keeps_nobody_out():
    with running(seconds=0.3) as server, connect(server) as line, connect(server) as other:
        line.sendall(GET.replace(b"/x", b"/large"))
        other.sendall(GET)
        assert reply(other) == (200, b"/x ")
        until(lambda: len(server.connections) == 1, PATIENCE)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_every_address_is_ipv4_too():
    try:
        listening = connection.listen("::", 0)
    except OSError:
        pytest.skip("no IPv6 here")
    with listening, socket.create_connection(("127.0.0.1", listening.getsockname()[1])):
        accepted, address = listening.accept()
        with accepted:
            assert address[0] == "::ffff:127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            connection.listen("::", listening.getsockname()[1])


def test_it_ends_with_connections_of_every_kind():
    with running() as server:
        lines = [connect(server) for _ in range(3)]
        lines[0].sendall(GET[:5])
        lines[1].sendall(GET.replace(b"/x", b"/wait"))
        until(lambda: server.busy == 1 and len(server.connections) == 3)
    for line in lines:
        while line.recv(100):
            pass
        line.close()
