"""Access: keys, guesses, hosts, origins and preflights."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.client import HTTPConnection

from experiments.attack.frame import Attempt, alive, command, server

KEY, ORIGIN, EVIL = "a right Key 7", "http://app.example", "http://evil.example"
CLOSED = (
    *(
        "/v1/kv",
        "/metrics",
        "/v1/models",
        "/v1/models/tiny",
        "/nothing",
        "/page/style.css/../../v1/kv",
    ),
    *("//v1/kv", "/V1/KV"),
)
OPEN = ("/", "/health", "/page/main.js", "/page/style.css")


def attempts(short: bool) -> Iterator[Attempt]:
    yield from _starts(short)
    with server("--api-key", KEY, "--allow-origin", ORIGIN) as running:
        yield from _origins(running.port)
        yield from _keys(running.port)
        yield from _guesses(running, 60 if short else 900)
    with server() as running:
        yield from _hosts(running.port)
        yield Attempt("the server is well after all of that", alive(running.port))


def _starts(short: bool) -> Iterator[Attempt]:
    keys = ["ab ", "ab\n", " ab", "", " ", "a\x1b[31mb", "schlüssel", "\t", "a\nb"]
    for key in keys[:3] if short else keys:
        ran = command("serve", "--port", "0", "--api-key", key, seconds=20)
        held = ran.one_line and (not key.strip() or key.strip() not in ran.err.decode())
        yield Attempt(f"key {key!r} is refused at the start, unseen", held, ran.note)
    for host in ("0.0.0.0",) if short else ("0.0.0.0", "::", "192.0.2.1", ""):
        ran = command("serve", "--port", "0", "--host", host, seconds=20)
        yield Attempt(f"--host {host!r} without a key is refused", ran.one_line, ran.note)


def send(port: int, method: str, path: str, **fields: str) -> tuple[int, dict, bytes]:
    """Ask with header fields, whose underlines are hyphens. Returns status, fields in lower case, body."""
    line = HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        body = b'{"prompt": "Hi", "max_tokens": 1}' if method == "POST" else None
        headers = {name.replace("_", "-"): value for name, value in fields.items()}
        line.request(method, path, body, headers)
        response = line.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    finally:
        line.close()


def _keys(port: int) -> Iterator[Attempt]:
    for path in CLOSED:
        for method in ("GET", "HEAD", "POST", "PUT", "BREW"):
            status, _, data = send(port, method, path)
            yield Attempt(
                f"{method} {path} without a key", status == 401, f"{status} {data[:80]!r}"
            )
    for path in ("/v1/completions", "/v1/chat/completions", "/chat/completions"):
        status, _, data = send(port, "POST", path)
        yield Attempt(f"POST {path} without a key", status == 401, f"{status} {data[:80]!r}")
    for path in OPEN:
        status, *_ = send(port, "GET", path)
        yield Attempt(f"GET {path} needs none", status == 200, str(status))
    right = (f"Bearer {KEY}", f"bearer {KEY}", f"BEARER   {KEY} ", KEY)
    for given in right:
        status, *_ = send(port, "POST", "/v1/completions", Authorization=given)
        yield Attempt(f"the right key as {given[:9]!r}", status == 200, str(status))
    # Each of these is a guess, and there are ten before an address waits.
    for given in (
        *(f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Bearer {KEY.upper()}"),
        *("Bearer \xff", "Bearer " + "x" * 9000),
    ):
        status, *_ = send(port, "GET", "/v1/kv", Authorization=given)
        yield Attempt(f"a wrong key as {given[:24]!r}", status in (401, 429), str(status))
    time.sleep(7)


def _guesses(running, count: int) -> Iterator[Attempt]:
    port, start = running.port, time.perf_counter()
    found = [send(port, "GET", "/v1/kv", Authorization=f"Bearer guess{i}") for i in range(count)]
    took = time.perf_counter() - start
    compared = sum(status == 401 for status, *_ in found)
    note = f"{compared} compared of {count} in {took:.1f} s"
    yield Attempt("guesses of keys are slowed down", compared <= 11 + took, note)
    waits = [fields.get("retry-after") for status, fields, _ in found if status == 429]
    held = bool(waits) and all(wait is not None and 0 < int(wait) <= 20 for wait in waits)
    yield Attempt("who guesses is told how long to wait", held, str(waits[:3]))
    said = running.output()
    lines = [line for line in said.splitlines() if "wrong key" in line]
    yield Attempt("guesses are logged", len(lines) >= 1 and "127.0.0.1" in lines[0], said[-200:])
    yield Attempt("their log is bounded", len(lines) <= 3 + took / 10, f"{len(lines)} lines")
    yield Attempt("no key is in the log", "guess0" not in said and KEY not in said)
    time.sleep(1 + int(waits[-1] or 0) if waits else 1)
    status, *_ = send(port, "GET", "/v1/kv", Authorization=f"Bearer {KEY}")
    yield Attempt("the right key is taken after the wait", status == 200, str(status))


def _origins(port: int) -> Iterator[Attempt]:
    right = {"Authorization": f"Bearer {KEY}"}
    for path in ("/v1/completions", "/v1/kv", "/"):
        for named in ("authorization", "authorization,content-type", "content-type,x-stainless-os"):
            asked = {
                "Access_Control_Request_Method": "POST",
                "Access_Control_Request_Headers": named,
            }
            status, fields, data = send(port, "OPTIONS", path, Origin=ORIGIN, **asked)
            allowed = fields.get("access-control-allow-headers", "").lower()
            held = status == 204 and not data and "authorization" in allowed and "*" in allowed
            held = held and fields.get("access-control-allow-origin") == ORIGIN
            yield Attempt(f"preflight of {path} for {named}", held, f"{status} {fields}"[:200])
            status, fields, _ = send(port, "OPTIONS", path, Origin=EVIL, **asked)
            held = status == 403 and "access-control-allow-origin" not in fields
            yield Attempt(f"... from another origin, {named}", held, f"{status} {fields}"[:200])
    for origin in (
        *(EVIL, "null", "http://app.example.evil.example", "https://app.example"),
        *("http://app.example:1", "", "file://"),
    ):
        status, fields, _ = send(port, "GET", "/v1/kv", Origin=origin, **right)
        held = status == 403 and "access-control-allow-origin" not in fields
        yield Attempt(f"origin {origin!r} gets nothing", held, f"{status} {fields}"[:200])
    status, fields, _ = send(port, "POST", "/v1/completions", Origin=ORIGIN, **right)
    held = status == 200 and fields.get("access-control-allow-origin") == ORIGIN
    yield Attempt(
        "the allowed origin gets a reply", held and "origin" in fields.get("vary", "").lower()
    )
    status, fields, _ = send(port, "GET", "/v1/kv", Origin=ORIGIN)
    held = status == 401 and fields.get("access-control-allow-origin") == ORIGIN
    yield Attempt("... and reads its refusals", held, f"{status} {fields}"[:200])


def _hosts(port: int) -> Iterator[Attempt]:
    bad = (
        *("evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.nip.io"),
        *("0.0.0.0", "[::", "localhost@evil.example", "127.0.0.1:x@e.example"),
        "example.com#localhost",
    )
    for host in bad:
        for asked in ("GET /", "GET /v1/kv", "POST /v1/completions", "OPTIONS /v1/kv"):
            method, path = asked.split()
            status, *_ = send(port, method, path, Host=host)
            yield Attempt(f"{asked} with host {host}", status in (400, 403), str(status))
    for host in ("localhost", f"127.0.0.1:{port}", "LocalHost:1", "[::1]:80"):
        status, _, data = send(port, "GET", "/v1/kv", Host=host)
        held = status == 200 and json.loads(data)["kv"] == "int4"
        yield Attempt(f"host {host} is this machine", held, str(status))
