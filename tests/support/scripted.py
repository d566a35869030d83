"""A server for the chat page that says what a test has written down, at the pace the test sets.

The page, its policy and its paths are those of `mlxkv serve`; only the model is missing. A reply is a list of
steps: ("read", done, all), ("sleep", seconds), ("think", text), ("say", text), ("wait", Event),
("end", reason), ("fault", text), ("status", number, text), ("hang up",).
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from threading import Event, Thread

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from mlxkv.serve.http.app import PAGE, PAGE_HEADERS, Files

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


class Scripted:
    """asked: bodies of requests, in order. replies: steps of the next ones; an echo when there are none.
    kv, usage: of the next reply. delay: seconds before the document of /v1/kv. key: the API key, if there is one.
    left: clients that hung up."""

    def __init__(self):
        self.asked: list[dict] = []
        self.replies: list[list[tuple]] = []
        self.kv = dict(KV)
        self.usage = {"prompt_tokens": 20, "completion_tokens": 7, "total_tokens": 27}
        self.delay, self.key = 0.0, None
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
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/"
        routes = [
            Route("/", lambda _: FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)),
            Mount("/page", Files(directory=PAGE)),
            Route("/v1/kv", self._kv),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_config=None, lifespan="off")
        self.server = uvicorn.Server(config)

    def says(self, *steps) -> None:
        self.replies.append(list(steps))

    def pause(self) -> Event:
        """An event for a ("wait", event) step, set at the end of the test at the latest."""
        self.waits.append(Event())
        return self.waits[-1]

    def _locked(self, request: Request) -> JSONResponse | None:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "[--api-key] wrong"}}, 401)
        return None

    async def _kv(self, request: Request) -> Response:
        await asyncio.sleep(self.delay)
        return self._locked(request) or JSONResponse(self.document)

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        if locked := self._locked(request):
            return locked
        self.asked.append(body)
        echo = [("say", "You said: " + body["messages"][-1]["content"]), ("end", "stop")]
        steps = self.replies.pop(0) if self.replies else echo
        if steps[0][0] == "status":
            return JSONResponse({"error": {"message": steps[0][2]}}, steps[0][1])
        return StreamingResponse(self._stream(steps), media_type="text/event-stream")

    async def _stream(self, steps: list[tuple]) -> AsyncIterator[str]:
        try:
            for step, *values in steps:
                if step == "wait":
                    while not values[0].is_set():
                        yield ": quiet\n\n"
                        await asyncio.sleep(0.02)
                elif step == "sleep":
                    await asyncio.sleep(values[0])
                elif step == "read":
                    yield ": keepalive {}/{}\n\n".format(*values)
                elif step in ("think", "say"):
                    name = "reasoning" if step == "think" else "content"
                    yield event({"choices": [{"index": 0, "delta": {name: values[0]}}]})
                elif step == "fault":
                    yield event({"error": {"message": values[0]}})
                elif step == "hang up":
                    return
                elif step == "end":
                    done = {"index": 0, "delta": {}, "finish_reason": values[0]}
                    yield event({"choices": [done], "kv": self.kv})
                    yield event({"choices": [], "usage": self.usage, "kv": self.kv})
                    yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.left.set()
            raise


def event(document: dict) -> str:
    return f"data: {json.dumps(document)}\n\n"


@contextmanager
def scripted() -> Iterator[Scripted]:
    here = Scripted()
    thread = Thread(target=here.server.run, kwargs={"sockets": [here.socket]})
    thread.start()
    try:
        yield here
    finally:
        for wait in here.waits:
            wait.set()
        here.server.should_exit = here.server.force_exit = True
        thread.join()
        here.socket.close()
