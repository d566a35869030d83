"""Connections: many, idle, slow, half-closed, broken off; the server answers and rests."""

from __future__ import annotations

import json
import re
import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path

from experiments.attack.frame import Attempt, alive, ask, raw, server

HOST = b"Host: localhost\r\n"
GET = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
IDLE, OPEN = 2300, 1100


def post(**body) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n%s" % (
        HOST,
        len(data),
        data,
    )


def attempts(short: bool) -> Iterator[Attempt]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 8192 if hard == resource.RLIM_INFINITY else min(hard, 8192)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
    try:
        with server("--max-requests", "700") as running:
            yield from _many(running, short)
        with server("--max-requests", "4", "--max-body", "1MB") as running:
            yield from _half(running)
            yield from _kept(running)
            yield from _left(running, 20 if short else 200)
            yield from _slow(running)
            quiet = "Traceback" not in running.output()
            yield Attempt("no traceback in the log", quiet, running.output()[-300:])
            yield Attempt("the server is well after all of that", alive(running.port))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


@contextmanager
def opened(port: int, count: int, data: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections on which the same bytes were sent."""
    with ExitStack() as stack:
        lines = [stack.enter_context(socket.socket()) for _ in range(count)]
        for line in lines:
            line.setblocking(False)
            line.connect_ex(("127.0.0.1", port))
            time.sleep(0.003)  # or the kernel drops some before the server sees them
        for line in lines:
            line.settimeout(20)
            try:
                line.sendall(data)
            except OSError:
                continue  # closed for others
        yield lines


def busy(pid: int, seconds: float) -> float:
    """Share of a core that a process uses while nothing is asked of it."""

    def spent() -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    time.sleep(0.5)
    before = spent()
    time.sleep(seconds)
    return (spent() - before) / 100 / seconds


def stream(port: int) -> tuple[bool, str]:
    """Whether a stream comes to its end."""
    body = {"prompt": "Once", "max_tokens": 8, "stream": True}
    status, data = ask(port, body)
    return status == 200 and data.endswith(b"data: [DONE]\n\n"), f"{status} {data[-60:]!r}"


def quick(port: int) -> tuple[bool, str]:
    start = time.perf_counter()
    status, data = ask(port, {"prompt": "Hi", "max_tokens": 1})
    seconds = time.perf_counter() - start
    return status == 200 and seconds < 5, f"{status} after {seconds:.1f} s {data[:80]!r}"


def _many(running, short: bool) -> Iterator[Attempt]:
    port, pid, seconds = running.port, running.process.pid, 1.0 if short else 5.0
    kinds = {
        f"{IDLE} idle connections": (IDLE, b""),
        f"{OPEN} connections with half a head": (OPEN, GET[:20]),
        f"{OPEN} connections with half a body": (OPEN, post(prompt="a")[:-3]),
        f"{OPEN} connections that have asked, and wait": (OPEN, GET),
    }
    for name, (count, data) in list(kinds.items())[: 2 if short else 4]:
        with opened(port, count, data):
            share = busy(pid, seconds)
            yield Attempt(f"{name}: the server rests", share < 0.3, f"{share:.0%} of a core")
            yield Attempt(f"{name}: a request is answered", *quick(port))
            yield Attempt(f"{name}: a stream is answered", *stream(port))
        yield Attempt(f"{name}, closed: a request is answered", *quick(port))
    start = time.perf_counter()
    count = 300 if short else 1500
    for _ in range(count):
        connect(port).close()
    took = time.perf_counter() - start
    yield Attempt(f"{count} connections that open and close", *quick(port))
    lines = [line for line in running.output().splitlines() if "oldest that wait" in line]
    yield Attempt("its log stays short", len(lines) <= 2 + took, f"{len(lines)} lines")


def _half(running) -> Iterator[Attempt]:
    asked = {
        "GET": GET,
        "GET in HTTP/1.0": b"GET /health HTTP/1.0\r\n" + HOST + b"\r\n",
        "a reply": post(prompt="Hi", max_tokens=4),
        "a reply in HTTP/1.0": post(prompt="Hi", max_tokens=4).replace(b"HTTP/1.1", b"HTTP/1.0"),
        "a long reply": post(prompt="Hi", max_tokens=60, logit_bias={"1": -100}),
        "a stream": post(prompt="Hi", max_tokens=4, stream=True),
        "a stream in HTTP/1.0": post(prompt="Hi", max_tokens=4, stream=True).replace(b"HTTP/1.1", b"HTTP/1.0"),
    }  # fmt: skip
    for name, data in asked.items():
        got, end = raw(running.port, data, seconds=30, half_close=True)
        held = re.search(rb"HTTP/1.1 200 ", got) is not None and end == "eof"
        held = held and got.rstrip().endswith((b"}", b"[DONE]", b"0"))
        yield Attempt(f"a half-closed client gets {name}", held, f"{end} {got[:80]!r}")
    got, end = raw(running.port, b"HEAD /health HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n")
    empty = got.startswith(b"HTTP/1.1 200") and got.endswith(b"\r\n\r\n")
    yield Attempt("HEAD has no body", empty, f"{end} {got!r}")
    for path in ("/", "/page/main.js", "/v1/models", "/v1/kv", "/metrics", "/nothing"):
        data = f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        got, end = raw(running.port, data.encode())
        held = end == "eof" and got.endswith(b"\r\n\r\n") and b"Content-Length" in got
        yield Attempt(f"HEAD {path} has no body", held, f"{end} {got[-80:]!r}")


def _kept(running) -> Iterator[Attempt]:
    line = HTTPConnection("127.0.0.1", running.port, timeout=20)
    line.connect()
    own, bad = line.sock.getsockname(), []
    for i in range(100):
        body = {"prompt": "Hi", "max_tokens": 1, "stream": i % 3 == 0, "temperature": -(i % 2)}
        path = ("/v1/completions", "/health", "/nothing")[i % 3]
        line.request(
            "POST" if i % 3 == 0 else "GET", path, json.dumps(body) if i % 3 == 0 else None
        )
        response = line.getresponse()
        data = response.read()
        want = ((400 if i % 2 else 200), 200, 404)[i % 3]
        if response.status != want or line.sock is None or line.sock.getsockname() != own:
            bad.append((i, response.status, data[:60]))
    line.close()
    yield Attempt("one connection for 100 requests, streams and refusals", not bad, str(bad[:3]))
    last = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    got, end = raw(running.port, post(prompt="Hi", max_tokens=1) + GET * 5 + last, seconds=20)
    count = got.count(b"HTTP/1.1 200")
    yield Attempt("seven requests at once are all answered", count == 7, f"{count} {end}")
    data = post(prompt="Hi", max_tokens=1)
    head = data[: data.index(b"\r\n\r\n")] + b"\r\nExpect: 100-continue\r\n\r\n"
    with connect(running.port) as one:
        one.sendall(head)
        first = one.recv(100)
        one.sendall(data[data.index(b"\r\n\r\n") + 4 :])
        then = one.recv(100)
    held = first.startswith(b"HTTP/1.1 100") and then.startswith(b"HTTP/1.1 200")
    yield Attempt("a client that waits for 100", held, f"{first!r} {then!r}")
    with connect(running.port) as one:
        one.sendall(head.replace(b"Content-Length: ", b"Content-Length: 99999999"))
        first = one.recv(100)
    yield Attempt("... is told 413 before it sends", b" 413 " in first, repr(first))
    big = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: 9000000\r\n\r\n"
    got, end = raw(running.port, big + bytes(9_000_000), seconds=20)
    yield Attempt("a client that sends all the same reads 413", b" 413 " in got[:20], f"{end}")


def _idle(running, seconds: float = 8.0) -> tuple[bool, str]:
    """Whether nothing is left over: requests, promised bytes."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = running.kv()
        left = (found["active_requests"], found["memory"]["promised_bytes"])
        if not any(left):
            return True, ""
        time.sleep(0.1)
    return False, f"requests, bytes: {left}"


def _left(running, count: int) -> Iterator[Attempt]:
    endless = {"prompt": "Hi", "max_tokens": 1500, "logit_bias": {"1": -100}, "ignore_eos": True}
    for name, more in {"a reply": {}, "a stream": {"stream": True}}.items():
        for how in ("close", "reset"):
            for pause in (0.0, 0.3):
                for _ in range(count // 20):
                    with connect(running.port) as line:
                        line.sendall(post(**endless, **more))
                        time.sleep(pause)
                        if how == "reset":
                            linger = struct.pack("ii", 1, 0)
                            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                held, note = _idle(running)
                yield Attempt(f"clients that leave {name} by {how} after {pause} s", held, note)
    data = post(prompt="Hi", max_tokens=1)
    for i in range(count):
        with connect(running.port) as line:
            line.sendall(data[: 1 + i * len(data) // count])
    yield Attempt(f"{count} clients that leave while they send", *_idle(running))
    yield Attempt("... and others are answered", *quick(running.port))


def _slow(running) -> Iterator[Attempt]:
    with opened(running.port, 30, GET[:10]) as lines:
        for _ in range(5):
            time.sleep(0.2)
            for line in lines:
                line.sendall(b"x")
        yield Attempt("30 heads byte by byte, 4 places: others are answered", *quick(running.port))
    large = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: 900000\r\n\r\n"
    with opened(running.port, 40, large + bytes(850_000)):
        yield Attempt(
            "40 bodies of .9 MB that stop short: others are answered", *quick(running.port)
        )
        rss = running.rss() >> 20
        yield Attempt("... and their bytes are bounded", rss < 1024, f"{rss} MiB")
    with ExitStack() as stack:
        for _ in range(16):
            line = stack.enter_context(connect(running.port))
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            line.sendall(b"GET /page/main.js HTTP/1.1\r\n%s\r\n" % HOST * 200)
        time.sleep(0.5)
        status, data = ask(running.port, {"prompt": "Hi", "max_tokens": 1})
        note = f"{status} {data[:80]!r}"
        yield Attempt(
            "16 clients that read nothing, 4 places: one answer", status in (200, 503), note
        )
    yield Attempt("... and when they have left", *_idle(running))
