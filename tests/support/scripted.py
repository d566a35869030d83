"""A server for the chat page that says what a test has written down, at the pace the test sets.

The page, its policy and its paths are those of `mlxkv serve`; only the model is missing. A reply is a list of
steps: ("read", done, all), ("sleep", seconds), ("think", text), ("say", text), ("wait", Event),
("end", reason), ("fault", text), ("status", number, text), ("hang up",).
"""

from __future__ import annotations

import json
import mimetypes
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

from mlxkv.serve.http.app import PAGE, PAGE_HEADERS

PATIENCE = 60
KV = {
    "preset": "int4",
    "tokens": 4096,
    "cached_tokens": 12,
    "exact_tokens": 192,
    "bytes": 5 << 20,
    "bytes_fp16": 16 << 20,
    "allocated_bytes": 7 << 20,
    "bits_per_value": 5.0,
    "ratio": 3.2,
    "note": None,
}


class Scripted(ThreadingHTTPServer):
    """asked: bodies of requests, in order. replies: steps of the next ones; an echo when there are none.
    kv, usage: of the next reply. key: the API key, if there is one. left: clients that hung up."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict] = []
        self.replies: list[list[tuple]] = []
        self.kv = dict(KV)
        self.usage = {"prompt_tokens": 20, "completion_tokens": 7, "total_tokens": 27}
        self.key: str | None = None
        self.left, self.waits = Event(), []
        self.document = {
            "model": "scripted",
            "kv": "int4",
            "context": 8192,
            "max_tokens": 512,
            "exact_tokens": 192,
            "report": ["layers 0-3: int4"],
            "memory": {
                "bound_bytes": 8 << 30,
                "promised_bytes": 0,
                "bytes": 6 << 20,
                "bytes_fp16": 20 << 20,
                "allocated_bytes": 9 << 20,
            },
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def says(self, *steps) -> None:
        self.replies.append(list(steps))

    def pause(self) -> Event:
        """An event for a ("wait", event) step, set at the end of the test at the latest."""
        self.waits.append(Event())
        return self.waits[-1]


class Handler(BaseHTTPRequestHandler):
    server: Scripted

    def log_message(self, *_):
        pass

    def _send(self, status: int, data: bytes, kind: str, headers: dict | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _json(self, status: int, document: dict) -> None:
        self._send(status, json.dumps(document).encode(), "application/json")

    def _locked(self) -> bool:
        key = self.server.key
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self._json(401, {"error": {"message": "[--api-key] wrong"}})
            return True
        return False

    def do_GET(self):
        file = PAGE / (self.path.removeprefix("/page/").strip("/") or "index.html")
        if file.is_file():
            kind = f"{mimetypes.guess_type(file)[0]}; charset=utf-8"
            self._send(200, file.read_bytes(), kind, PAGE_HEADERS)
        elif self.path == "/v1/kv" and not self._locked():
            self._json(200, self.server.document)
        elif self.path != "/v1/kv":
            self._send(404, b"", "text/plain")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._locked():
            return
        self.server.asked.append(body)
        echo = [("say", "You said: " + body["messages"][-1]["content"]), ("end", "stop")]
        steps = self.server.replies.pop(0) if self.server.replies else echo
        if steps[0][0] == "status":
            self._json(steps[0][1], {"error": {"message": steps[0][2]}})
            return
        with suppress(ConnectionError):
            self._stream(steps)
            return
        self.server.left.set()

    def _stream(self, steps: list[tuple]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for step, *values in steps:
            if step == "wait":
                while not values[0].wait(0.05):
                    self._write(b": quiet\n\n")  # raises where the page has hung up
            elif step == "sleep":
                time.sleep(values[0])
            elif step == "read":
                self._write(b": keepalive %d/%d\n\n" % tuple(values))
            elif step in ("think", "say"):
                name = "reasoning" if step == "think" else "content"
                self._event({"choices": [{"index": 0, "delta": {name: values[0]}}]})
            elif step == "fault":
                self._event({"error": {"message": values[0]}})
            elif step == "hang up":
                return
            elif step == "end":
                done = {"index": 0, "delta": {}, "finish_reason": values[0]}
                self._event({"choices": [done], "kv": self.server.kv})
                self._event({"choices": [], "usage": self.server.usage, "kv": self.server.kv})
                self._write(b"data: [DONE]\n\n")

    def _event(self, document: dict) -> None:
        self._write(b"data: " + json.dumps(document).encode() + b"\n\n")

    def _write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()


@contextmanager
def scripted() -> Iterator[Scripted]:
    server = Scripted()
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        for wait in server.waits:
            wait.set()
        server.shutdown()
        thread.join()
        server.server_close()
