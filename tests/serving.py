"""A server of a test's own, and clients that say what they please."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from threading import Thread

from mlxkv.serve.options import Options
from mlxkv.serve.run import Server


@contextmanager
def serving(model, kv: str = "int4", **options) -> Iterator[Server]:
    server = Server(Options(model=str(model), kv=kv, port=0, **options))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.close()


def send(
    server: Server, method: str, path: str, body=None, headers=None
) -> tuple[int, dict, bytes]:
    """Status, headers, body of the response. body: bytes as they are, anything else as JSON."""
    line = HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        line.request(method, path, data, headers or {})
        response = line.getresponse()
        return response.status, dict(response.headers), response.read()
    finally:
        line.close()


def get(server: Server, path: str, **headers) -> dict:
    status, _, data = send(server, "GET", path, headers=headers)
    assert status == 200, data
    return json.loads(data)


def post(server: Server, path: str, **body) -> dict:
    status, _, data = send(server, "POST", path, body)
    assert status == 200, data
    return json.loads(data)


def complete(server: Server, prompt: str, tokens: int = 8, **more) -> dict:
    return post(server, "/v1/completions", prompt=prompt, max_tokens=tokens, **more)


def text_of(response: dict) -> str:
    return response["choices"][0]["text"]


def refused(server: Server, status: int, path: str = "/v1/completions", **body) -> dict:
    """The error of a request that must fail with this status."""
    found, _, data = send(server, "POST", path, body)
    assert found == status, data
    return json.loads(data)["error"]


def events(data: bytes) -> list[dict]:
    """The documents of a stream, which has to end as OpenAI's do."""
    lines = [line[6:] for line in data.decode().splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]
