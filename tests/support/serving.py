"""Servers in the test's process, and clients that may send anything."""

import json
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from http.client import HTTPConnection
from threading import Event, Thread

from pytest import MonkeyPatch

from mlxkv.errors import MachineError
from mlxkv.serve import reading, run
from mlxkv.serve.http import connection
from mlxkv.serve.options import ServeOptions
from mlxkv.serve.prompts import Prompts
from mlxkv.serve.refusals import OtherModel, Postponed, Refused, ending
from mlxkv.serve.run import Server

LONG = "All work and no play. " * 14  # 308 tokens: several pages
ENDLESS = {"prompt": "b", "max_tokens": 1500, "logit_bias": {"257": -100}}  # never the last token
PATIENCE = 300.0  # seconds until a test gives up; never waited for on success


class ThreadWorker(reading.Worker):
    """Parses in this process, without limits: a process takes a second to start."""

    def start(self):
        if self._has_ended:
            raise ending()

    def keep(self, setup: bytes) -> None:
        self._prompts = Prompts(*pickle.loads(setup))

    def read(self, seconds: float, *question):
        self.start()
        try:
            return pickle.loads(pickle.dumps(self._prompts.read(*question)))
        except (Refused, Postponed, OtherModel):
            raise
        except Exception as error:
            raise MachineError(f"[serve] {type(error).__name__}: {error}") from None


PROCESS_WORKER = reading.Worker


@contextmanager
def workers(kind: type[reading.Worker]) -> Iterator[None]:
    """What reads the requests of the servers that start meanwhile."""
    with MonkeyPatch.context() as patch:
        for module in (reading, run):
            patch.setattr(module, "Worker", kind)
        yield


@contextmanager
def serving(
    model, kv: str = "int4", body=None, chunk=None, worker=ThreadWorker, **options
) -> Iterator[Server]:
    """body: most bytes of a request. chunk: tokens of a prompt that are read at once."""
    with workers(worker):  # models may be loaded at any time
        yield from _serving(model, kv, body, chunk, options)


def _serving(model, kv: str, body, chunk, options: dict) -> Iterator[Server]:
    models = [str(each) for each in (model if isinstance(model, list) else [model])]
    with MonkeyPatch.context() as patch:
        if body:
            patch.setattr(connection, "BODY", body)
        if chunk:
            patch.setattr("mlxkv.serve.engine.prefill_step", lambda: chunk)
        server = Server(ServeOptions(model=models, kv=kv, port=0, **options))
    thread = Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        server.stop()  # in a hurry
        thread.join()


def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.003)


def settled(server: Server) -> dict:
    """/v1/kv once no request is under way."""

    def idle() -> bool:
        nonlocal found
        found = get(server, "/v1/kv")
        return not found["active_requests"] and not found["memory"]["promised_bytes"]

    found: dict = {}
    until(idle)
    return found


@contextmanager
def held(monkeypatch, owner, name: str, kind: type = object) -> Iterator[Event]:
    """Calls of a method whose last argument is of this kind wait until the event is set, or the block ends."""
    go, plain = Event(), getattr(owner, name)

    def waits(*args, **kwargs):
        assert not isinstance(args[-1], kind) or go.wait(PATIENCE)
        return plain(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, waits)
        try:
            yield go
        finally:
            go.set()


def read_prompts(server: Server, monkeypatch) -> list:
    """The list that gets the prompt of every request that the server reads from now on."""
    prompts, plain = [], server.loaded_model.read

    async def spied(*args):
        result = await plain(*args)
        prompts.append(result.prompt)
        return result

    monkeypatch.setattr(server.loaded_model, "read", spied)
    return prompts


def raw_post(body: bytes, length: int | None = None) -> bytes:
    """The bytes of a request. length: what its head says, where that is not true."""
    length = len(body) if length is None else length
    start = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    return start.encode() + body


@contextmanager
def asking(server: Server, **body) -> Iterator[socket.socket]:
    """A connection with a request on it, closed at the end of the block."""
    with socket.create_connection(server.server_address) as line:
        line.sendall(raw_post(json.dumps(body).encode()))
        yield line


def send(
    server: Server, method: str, path: str, body=None, headers=None
) -> tuple[int, Message, bytes]:
    """Status, headers and body of the response. body: bytes, or anything else, sent as JSON."""
    line = HTTPConnection("127.0.0.1", server.server_address[1], timeout=PATIENCE)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        line.request(method, path, data, headers or {})
        response = line.getresponse()
        return response.status, response.headers, response.read()
    finally:
        line.close()


def get(server: Server, path: str, **headers) -> dict:
    status, _, data = send(server, "GET", path, headers=headers)
    assert status == 200, data
    return json.loads(data)


def post(server: Server, path: str, headers=None, **body) -> dict:
    status, _, data = send(server, "POST", path, body, headers)
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
    """The documents of a stream, which has to end like OpenAI's."""
    lines = [line[6:] for line in data.decode().splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]
