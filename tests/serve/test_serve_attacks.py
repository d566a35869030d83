"""What a client that means harm sees, byte for byte: heads, bodies and values, over real sockets."""

import json
import re
import socket

import pytest
from serving import send

HOST, END = b"Host: localhost\r\n", b"Connection: close\r\n\r\n"
BODY = b'{"prompt": "Hi", "max_tokens": 1}'
HIDDEN = b"GET /v1/models HTTP/1.1\r\n" + HOST + END
LENGTH = b"Content-Length: %d" % len(BODY)
CODED, CHUNKS = b"Transfer-Encoding: chunked", b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


def get(target: bytes = b"/health", *fields: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    head = b"GET " + target + b" " + version + b"\r\n" + HOST
    return head + b"".join(field + b"\r\n" for field in fields) + END


def post(*fields: bytes, body: bytes = BODY, version: bytes = b"HTTP/1.1") -> bytes:
    head = b"POST /v1/completions " + version + b"\r\n" + HOST
    return head + b"".join(field + b"\r\n" for field in fields) + END + body


def host(value: bytes) -> bytes:
    return b"GET /v1/kv HTTP/1.1\r\nHost: " + value + b"\r\n" + END


# What is sent, and the statuses that may come: one reply, and the connection is closed after it.
HEADS = {
    "plain": (get(), {200}),
    "HTTP/1.0": (get(version=b"HTTP/1.0"), {200}),
    "HTTP/2's preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {505}),
    "HTTP/0.9": (b"GET /health\r\n\r\n", {400}),
    "no version": (get(version=b"HTTP/a.b"), {400}),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", {400}),
    "zeros": (bytes(1000), {400}),
    "method": (get().replace(b"GET", b"BREW", 1), {405, 501}),
    "method in small letters": (get().replace(b"GET", b"get", 1), {405, 501}),
    "target http://[": (get(b"http://["), {400}),
    "target with a zero": (get(b"/\x00"), {400}),
    "target with a space": (get(b"/a b"), {400}),
    "target with an escape": (get(b"/\x1b[31m"), {400}),
    "target above the folder": (get(b"/../etc/passwd"), {404}),
    "target above the folder, encoded": (get(b"/%2e%2e/x"), {404}),
    "target for another host": (get(b"http://evil.example/v1/kv"), {400}),
    "target of 9,000 bytes": (get(b"/" + b"a" * 9000), {414}),
    "two lengths": (post(LENGTH, b"Content-Length: 5"), {400}),
    "two lengths, the shorter first": (post(b"Content-Length: 5", LENGTH), {400}),
    "length and chunks": (post(LENGTH, CODED, body=CHUNKS), {400}),
    "chunks and length": (post(CODED, LENGTH, body=CHUNKS), {400}),
    "no length": (post(), {411}),
    "length -1": (post(b"Content-Length: -1"), {400}),
    "length +5": (post(b"Content-Length: +5"), {400}),
    "length 0x10": (post(b"Content-Length: 0x10"), {400}),
    "length 1_0": (post(b"Content-Length: 1_0"), {400}),
    "length of 20 nines": (post(b"Content-Length: " + b"9" * 20), {400, 413}),
    "length with a space before the colon": (post(b"Content-Length : 33"), {400}),
    "chunks in HTTP/1.0": (post(CODED, body=CHUNKS, version=b"HTTP/1.0"), {400}),
    "gzip, chunked": (post(b"Transfer-Encoding: gzip, chunked", body=CHUNKS), {400, 501}),
    "xchunked": (post(b"Transfer-Encoding: xchunked", body=CHUNKS), {400, 501}),
    "coding on a folded line": (post(b"Transfer-Encoding:\r\n chunked", LENGTH), {400}),
    "chunk size -3": (post(CODED, body=b"-3\r\nabc\r\n0\r\n\r\n"), {400}),
    "chunk size zz": (post(CODED, body=b"zz\r\n"), {400}),
    "chunks that are too long": (post(CODED, body=b"fffffff\r\n" + bytes((64 << 10) + 9)), {413}),
    "length that is too long": (post(b"Content-Length: 99999999999999"), {413}),
    "target without an end": (b"GET /" + b"a" * 200_000, {414}),
    "chunk without its end": (post(CODED, body=b"3\r\nabcdef\r\n0\r\n\r\n"), {400}),
    "no host": (b"GET /health HTTP/1.1\r\n" + END, {400}),
    "two hosts": (get(b"/health", HOST[:-2]), {400}),
    "host of another site": (host(b"evil.example"), {403}),
    "host that begins like ours": (host(b"localhost.evil.example"), {403}),
    "host behind a name": (host(b"a@localhost@b"), {400, 403}),
    "field without a colon": (get(b"/health", b"nonsense"), {400}),
    "field with a zero": (get(b"/health", b"A: b\x00"), {400}),
    "field of 200 KB": (get(b"/health", b"A: " + b"b" * 200_000), {431}),
    "200 fields": (get(b"/health", *[b"A: b"] * 200), {431}),
}  # fmt: skip
BODIES = {
    "nothing": b"", "half": b"{", "a list": b"[]", "a number": b"1", "not UTF-8": b"\xff\xfe",
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"), "half of a pair": b'{"prompt": "\\ud800"}',
    "NaN": b'{"prompt": "a", "temperature": NaN}', "1e999": b'{"prompt": "a", "temperature": 1e999}',
    "5,000 digits": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "zeros": bytes(1000),
    "two bodies": b'{"prompt": "a"} {"prompt": "b"}', "a deep list": b"[" * 20_000 + b"]" * 20_000,
}  # fmt: skip


def raw(server, data: bytes) -> bytes:
    """Send bytes, and read until the server closes the connection."""
    got = b""
    with socket.create_connection(server.server_address, timeout=20) as line:
        try:
            line.sendall(data)
            while part := line.recv(1 << 16):
                got += part
        except ConnectionError:  # closed with bytes that nobody read
            pass
    return got


@pytest.mark.parametrize("name", HEADS)
def test_one_reply_and_no_hidden_request(server, name):
    data, allowed = HEADS[name]
    statuses = re.findall(rb"HTTP/1\.[01] (\d{3}) ", raw(server, data + HIDDEN))
    assert len(statuses) == 1 and int(statuses[0]) in allowed


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_no_request_is_one_line(server, name):
    status, _, data = send(server, "POST", "/v1/chat/completions", BODIES[name])
    said = json.loads(data)["error"]["message"]
    assert status == 400 and said.startswith("[") and said.isprintable()
