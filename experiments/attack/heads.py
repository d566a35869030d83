"""HTTP: heads that contradict themselves, hide a second request, or are none."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from experiments.attack.frame import Attempt, alive, raw, server

HOST = b"Host: localhost\r\n"
END = b"Connection: close\r\n\r\n"
BODY = b'{"prompt": "Hi", "max_tokens": 1}'
HIDDEN = b"GET /v1/models HTTP/1.1\r\n" + HOST + END
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")


def get(target: bytes = b"/health", *fields: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    head = b"GET " + target + b" " + version + b"\r\n" + HOST
    return head + b"".join(field + b"\r\n" for field in fields) + END


def post(*fields: bytes, body: bytes = BODY, version: bytes = b"HTTP/1.1") -> bytes:
    head = b"POST /v1/completions " + version + b"\r\n" + HOST
    return head + b"".join(field + b"\r\n" for field in fields) + END + body


def long(length: int) -> bytes:
    return b"Content-Length: %d" % length


CODED, CHUNKS = b"Transfer-Encoding: chunked", b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
EXTENDED = CHUNKS.replace(b"\r\n", b";a=b\r\n", 1)[:-2] + b"A: b\r\n\r\n"
RIGHT = long(len(BODY))

# What is sent, and the statuses that may come. One reply, and the connection is closed after it.
PLAIN: list[tuple[str, bytes, set[int]]] = [
    ("a plain request", get(), {200}),
    ("HTTP/1.0", get(version=b"HTTP/1.0"), {200}),
    ("HTTP/1.9", get(version=b"HTTP/1.9"), {200, 505}),
    *((f"version {v.decode()}", get(version=v), {505}) for v in (b"HTTP/2.0", b"HTTP/3.0", b"HTTP/9.9", b"HTTP/0.9")),
    *(
        (f"version {v.decode('latin-1')!r}", get(version=v), {400})
        for v in (
            *(b"http/1.1", b"HTTP/1", b"HTTP/1.10", b"HTTP/-1.1", b"HTTP/1.1 x", b"XTTP/1.1"),
            *(b"HTTP/a.b", b""),
        )
    ),
    ("HTTP/2's preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {505}),
    ("HTTP/0.9", b"GET /health\r\n\r\n", {400}),
    ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", {400}),
    ("zeros", bytes(1000), {400}),
    ("empty lines", b"\r\n\r\n\r\n", {400}),
    *(
        (f"method {m.decode()}", get().replace(b"GET", m, 1), {405, 501})
        for m in (b"PUT", b"DELETE", b"PATCH", b"TRACE", b"CONNECT", b"BREW", b"get", b"X" * 900)
    ),
    ("method with a quote", get().replace(b"GET", b'G"T', 1), {400}),
    # targets
    *(
        (f"target {t.decode('latin-1')!r}", get(t), {400})
        for t in (
            *(b"http://[", b"http://[::1", b"http://[::1]]/", b"*", b"health", b"ftp://a/"),
            *(b"http:///x", b"http:", b"?", b"#"),
        )
    ),
    *(
        (f"target {t.decode('latin-1')!r}", get(t), {404})
        for t in (
            *(b"//[", b"//", b"/../etc/passwd", b"/%2e%2e/x", b"/%00", b"/v1/kv/"),
            *(b"/page/style.css%00", b"/health/..", b"/" + b"a/" * 2000),
        )
    ),
    *(
        (f"target {t.decode('latin-1')!r}", get(t), {400})
        for t in (b"/\x00", b"/a b", b"/\xff\xfe", b"/\t", b"/\x1b[31m")
    ),
    ("target for another host", get(b"http://evil.example/v1/kv"), {403}),
    ("target with this host", get(b"http://localhost/health"), {200}),
    ("target of 9,000 bytes", get(b"/" + b"a" * 9000), {414}),
    ("target of 1 MB", b"GET /" + b"a" * (1 << 20), {414}),
    ("POST to a bad target", post(RIGHT).replace(b"/v1/completions", b"http://[", 1), {400}),
    # lengths
    ("a length", post(RIGHT), {200}),
    ("the same length twice", post(RIGHT, RIGHT), {200, 400}),
    ("chunks", post(CODED, body=CHUNKS), {200}),
    ("chunks with an extension and a trailer", post(CODED, body=EXTENDED), {200}),
    ("no length", post(), {411}),
    *(
        (f"length {v.decode('latin-1')!r}", post(b"Content-Length: " + v), {400, 413})
        for v in (
            *(b"-1", b"+5", b"1e3", b"0x10", b"1_0", b"5 5", b"5,6", b"5;6", b"", b"\xb2"),
            *(b"999999999999999999", b"9" * 20, b"9" * 400, b"1" * 5000),
            *(b"9223372036854775808", b"18446744073709551616", b"NaN", b"5.0"),
        )
    ),
    ("two lengths that differ", post(RIGHT, long(5)), {400}),
    ("two lengths that differ, the shorter first", post(long(5), RIGHT), {400}),
    ("length and chunks", post(RIGHT, CODED, body=CHUNKS), {400}),
    ("chunks and length", post(CODED, RIGHT, body=CHUNKS), {400}),
    ("length 0 and chunks", post(long(0), CODED, body=CHUNKS), {400}),
    ("chunks in HTTP/1.0", post(CODED, body=CHUNKS, version=b"HTTP/1.0"), {400}),
    *(
        (f"transfer coding {v.decode('latin-1')!r}", post(b"Transfer-Encoding: " + v, body=CHUNKS), {400, 501})
        for v in (
            *(b"gzip", b"gzip, chunked", b"chunked, gzip", b"identity", b"xchunked"),
            *(b"chunked, chunked", b"", b"chunked;q=1", b"\x0bchunked", b'"chunked"'),
        )
    ),
    ("transfer coding in capitals", post(b"transfer-encoding: CHUNKED", body=CHUNKS), {200}),
    ("two transfer codings", post(CODED, b"Transfer-Encoding: identity", body=CHUNKS), {400, 501}),
    ("transfer coding with a space before the colon", post(b"Transfer-Encoding : chunked", RIGHT), {400}),
    ("length with a space before the colon", post(b"Content-Length : 33"), {400}),
    ("transfer coding on a folded line", post(b"Transfer-Encoding:\r\n chunked", RIGHT), {400}),
    *(
        (f"chunk size {v.decode('latin-1')!r}", post(CODED, body=v + b"\r\nabc\r\n0\r\n\r\n"), {400})
        for v in (b"zz", b"-3", b"+3", b"0x3", b"", b"3 3", b"1" * 21, b"\xb2")
    ),
    ("a chunk of exabytes", post(CODED, body=b"f" * 15 + b"\r\n" + bytes(9 << 20)), {413}),
    ("a chunk without its end", post(CODED, body=b"3\r\nabcdef\r\n0\r\n\r\n"), {400}),
    # fields
    ("no host", b"GET /health HTTP/1.1\r\n" + END, {400}),
    ("two hosts", get(b"/health", HOST[:-2]), {400}),
    *(
        (f"host {v.decode('latin-1')!r}", b"GET /v1/kv HTTP/1.1\r\nHost: " + v + b"\r\n" + END, {400, 403})
        for v in (
            *(b"evil.example", b"", b"localhost.evil.example", b"[", b"[::1"),
            *(b"a@localhost@b", b"127.0.0.1.nip.io", b"0.0.0.0", b"localhost\x00", b"127.1"),
        )
    ),
    *(
        (f"host {v.decode('latin-1')!r}", b"GET /v1/kv HTTP/1.1\r\nHost: " + v + b"\r\n" + END, {200})
        for v in (b"localhost", b"LOCALHOST:1", b"127.0.0.1:99", b"[::1]:80")
    ),
    *(
        (f"field {v.decode('latin-1')!r}", get(b"/health", v), {400})
        for v in (
            *(b"nonsense", b": b", b"A : b", b"A: b\x00", b"\x00: b", b"A b: c", b"\xff: b"),
            b"A: b\x0b",
        )
    ),
    ("a folded field", get(b"/health", b"A: b\r\n c"), {200, 400}),
    ("a fold at the start", b"GET /health HTTP/1.1\r\n A: b\r\n" + HOST + END, {400}),
    ("lines that end in LF", get().replace(b"\r\n", b"\n"), {200, 400}),
    ("a field of 60 KB", get(b"/health", b"A: " + b"b" * 60_000), {200}),
    ("a field of 200 KB", get(b"/health", b"A: " + b"b" * 200_000), {431}),
    ("a field without end", b"GET / HTTP/1.1\r\nA: " + b"b" * (1 << 20), {431}),
    ("200 fields", get(b"/health", *[b"A: b"] * 200), {431}),
    ("20,000 fields", get(b"/health", *[b"A: b"] * 20_000), {431}),
    ("an upgrade to WebSockets", get(b"/health", b"Upgrade: websocket", b"Connection: Upgrade"), {200}),
    ("an upgrade to HTTP/2", get(b"/health", b"Upgrade: h2c", b"HTTP2-Settings: AAAA"), {200}),
    ("an unknown expectation", get(b"/health", b"Expect: miracles"), {200, 417}),
]  # fmt: skip


def attempts(short: bool) -> Iterator[Attempt]:
    with server() as running:
        for name, data, want in PLAIN:
            before = len(running.output())
            # What follows a refused head is not a request: two replies would be one too many.
            got, end = raw(running.port, data + HIDDEN, seconds=10)
            statuses = [int(status) for status in STATUS.findall(got) if status != b"100"]
            quiet = "Traceback" not in running.output()[before:]
            held = len(statuses) == 1 and statuses[0] in want and end != "timeout" and quiet
            note = f"{statuses}, {end}{'' if quiet else ', a traceback in the log'}"
            yield Attempt(name, held, f"{note}; wanted one of {sorted(want)}")
        yield from _fuzz(running, 150 if short else 1200)
        yield Attempt("the server is well after all of that", alive(running.port))


def _fuzz(running, count: int) -> Iterator[Attempt]:
    draw, before = random.Random(11), len(running.output())
    parts = (
        *(b"GET ", b"POST ", b"/", b"/v1/completions", b" HTTP/1.1", b" HTTP/1.0", b"\r\n", b"\n"),
        *(b"\r\n\r\n", HOST, RIGHT + b"\r\n", CODED + b"\r\n", b"http://", b"[", b"]", b":", b" "),
        *(b"\x00", b"\xff", b"Content-Length: ", b"9" * 30, b"Host: ", BODY, CHUNKS, b"%00", b"\t"),
    )
    odd = []
    for i in range(count):
        data = b"".join(draw.choice(parts) for _ in range(draw.randrange(1, 14)))
        got, end = raw(running.port, data, seconds=10, half_close=True)
        if (got and not STATUS.match(got)) or end == "timeout":
            odd.append((i, data[:60], got[:60], end))
    quiet = "Traceback" not in running.output()[before:]
    yield Attempt(f"{count} random heads get HTTP or nothing", not odd, str(odd[:3]))
    yield Attempt(f"{count} random heads leave no traceback", quiet)
