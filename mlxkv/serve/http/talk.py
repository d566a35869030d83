"""One request for a reply: it is handed to the engine, and the reply is written as its tokens come."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, contextmanager
from typing import Any

from starlette.responses import JSONResponse

from mlxkv.serve.apis.reply import Reply
from mlxkv.serve.engine import Engine
from mlxkv.serve.job import Job, Start, Token
from mlxkv.serve.refusals import Refused, fault

STREAM = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


class Document(JSONResponse):
    """A document of JSON, in ASCII."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode()


class Disconnect(Exception):
    """The client has hung up."""


class Channel:
    """Brings what other threads put into it to the event loop of the thread that made it."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue = asyncio.Queue()
        self.get = self._items.get

    def put(self, item: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:  # the loop has ended, and the client was told
            pass


def late(seconds: float) -> Refused:
    return Refused(504, f"[--timeout] took more than {seconds:g} s", "timeout")


@contextmanager
def admitted(engine: Engine):
    """Count one of the requests in progress, if it is not one too many. Raises Refused."""
    metrics = engine.metrics
    if metrics.active >= engine.options.max_requests:
        raise Refused(429, f"[--max-requests] {metrics.active} under way", "busy", retry=1)
    metrics.add(active=1)
    try:
        yield
    finally:
        metrics.add(active=-1)


class Talk:
    """The reply to one request, as an application of ASGI. arrival_time: of the request's first byte, by
    `time.monotonic`."""

    def __init__(self, engine: Engine, reply: Reply, job: Job, arrival_time: float):
        self._engine, self._reply, self._job = engine, reply, job
        self._arrival_time = arrival_time

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        reply, has_begun = self._reply, False
        channel = self._job.channel = Channel()
        watch = asyncio.create_task(_watch(receive, channel))
        try:
            async with aclosing(self._pieces(channel)) as pieces:
                async for data in pieces:
                    if reply.streams and not has_begun:
                        head = {"type": "http.response.start", "status": 200}
                        await send(head | {"headers": STREAM})
                        has_begun = True
                    if reply.streams and data:
                        body = {"type": "http.response.body", "body": data}
                        await send(body | {"more_body": True})
            if reply.streams:
                await send({"type": "http.response.body", "body": b""})
            else:
                await Document(reply.document())(scope, receive, send)
        except Disconnect:
            self._engine.metrics.add(cut_off=1)
        except Exception as error:
            refused = error if isinstance(error, Refused) else fault(error)
            if not has_begun:
                raise refused from None
            scope["wire"].cycle.keep_alive = False
            await send({"type": "http.response.body", "body": reply.error_event(refused)})
        finally:
            watch.cancel()
            self._job.cancelled = True
            if (prompt := reply.prompt) is not None:
                reused, dropped = prompt.cached_tokens, self._job.dropped
                scope["counts"] = f": {prompt.prompt_tokens} tokens in, {reused} reused, "
                scope["counts"] += f"{reply.count} out"
                scope["counts"] += f", {dropped} messages dropped" if dropped else ""

    async def _pieces(self, channel: Channel) -> AsyncIterator[bytes]:
        """Yield the parts of a stream, b"" without one. Raises Disconnect, Refused, and what the engine has raised."""
        engine, reply, job = self._engine, self._reply, self._job
        limit, first_token, start = engine.options.timeout, None, None
        end = self._arrival_time + limit
        timer = asyncio.get_running_loop().call_at(end, channel.put, late(limit))
        try:
            engine.submit(job)
            while (item := await channel.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, Start):
                    start = item
                    yield reply.begin(item)
                elif isinstance(item, Token):
                    first_token = first_token or time.monotonic() - self._arrival_time
                    yield reply.take(item)
                else:
                    yield reply.wait(*item)
            yield reply.close(engine.kv_document(job), job.text.word)
        finally:
            timer.cancel()
            if start is not None:
                engine.metrics.add(
                    prompt_tokens=start.prompt_tokens,
                    cached_tokens=start.cached_tokens,
                    generated_tokens=reply.count,
                )
                engine.metrics.took(first_token, time.monotonic() - self._arrival_time)


async def _watch(receive: Callable, channel: Channel) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    channel.put(Disconnect())
