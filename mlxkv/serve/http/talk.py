"""One request for a reply: it is read and handed to the engine, and the reply is written as its tokens come."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse

from mlxkv.serve.apis.reply import Reply
from mlxkv.serve.engine import Engine
from mlxkv.serve.http.access import tenant
from mlxkv.serve.http.models import Models
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


class Talk:
    """The reply to the request in a body, as an application of ASGI. key: of the client. arrival_time: of the request's
    first byte, by `time.monotonic`."""

    def __init__(self, models: Models, raw: bytes, key: str | None, arrival_time: float):
        self._models, self._raw, self._key = models, raw, key
        self._arrival_time = arrival_time

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        reply, has_begun = None, False
        try:
            async with self._models.read(scope["path"], self._raw, self._arrival_time) as (
                site,
                (reply, prompt, dropped),
            ):
                engine, asked = site.engine, reply.request
                owner = await run_in_threadpool(tenant, self._key, asked.user, asked.cache_salt)
                job = Job(asked, prompt, owner, dropped)
                job.constraint = await run_in_threadpool(engine.constraint_of, job)
                async with aclosing(self._pieces(engine, reply, job, scope, receive)) as pieces:
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
            engine.metrics.counts["cut_off"] += 1
        except Exception as error:
            refused = error if isinstance(error, Refused) else fault(error)
            if not has_begun:
                raise refused from None
            scope["wire"].cycle.keep_alive = False
            await send({"type": "http.response.body", "body": reply.error_event(refused)})

    async def _pieces(
        self, engine: Engine, reply: Reply, job: Job, scope: dict, receive: Callable
    ) -> AsyncIterator[bytes]:
        """Yield the parts of a stream, b"" without one. Raises Disconnect, Refused, and what the engine has raised."""
        channel, first_token, start = Channel(), None, None
        job.channel, watch = channel, asyncio.create_task(_watch(receive, channel))
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
            watch.cancel()
            job.cancelled = True
            if start is not None:
                metrics, total, reused = engine.metrics, start.prompt_tokens, start.cached_tokens
                metrics.counts.update(
                    prompt_tokens=total, cached_tokens=reused, generated_tokens=reply.count
                )
                if first_token is not None:
                    metrics.took("first_token", first_token)
                metrics.took("duration", time.monotonic() - self._arrival_time)
                scope["counts"] = f": {total} tokens in, {reused} reused, {reply.count} out"
                scope["counts"] += f", {job.dropped} messages dropped" if job.dropped else ""


async def _watch(receive: Callable, channel: Channel) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    channel.put(Disconnect())
