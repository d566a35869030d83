"""One request for a reply: it is read and handed to the engine, and the reply is written as its tokens come."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
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
    """A document of JSON, in ASCII: a model may have written half of a surrogate pair."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode()


class Disconnect(Exception):
    """The client has hung up."""


class Talk:
    """The reply to the request in a body, as an application of ASGI. key: of the client. arrival_time: of the request's
    first byte, by `time.monotonic`."""

    def __init__(self, models: Models, raw: bytes, key: str | None, arrival_time: float):
        self._models, self._raw, self._key = models, raw, key
        self._arrival_time, self._first_token = arrival_time, None
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue = asyncio.Queue()

    def put(self, item: Any) -> None:
        """Bring what another thread tells to the event loop: the channel of a job."""
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:  # the loop has ended, and the client was told
            pass

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        reply, has_begun = None, False

        async def write(data: bytes, more: bool = True) -> None:
            nonlocal has_begun
            if not reply.streams:
                return
            if not has_begun:
                await send({"type": "http.response.start", "status": 200, "headers": STREAM})
                has_begun = True
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async with self._models.read(scope["path"], self._raw, self._arrival_time) as (
                site,
                (reply, prompt, dropped),
            ):
                engine, asked = site.engine, reply.request
                owner = await run_in_threadpool(tenant, self._key, asked.user, asked.cache_salt)
                job = Job(asked, prompt, owner, dropped, channel=self)
                job.constraint = await run_in_threadpool(engine.constraint_of, job)
                watch = asyncio.create_task(self._watch(receive))
                try:
                    await self._follow(engine, reply, job, write)
                finally:
                    watch.cancel()
                    job.cancelled = True
                    scope["counts"] = self._counts(engine, reply, job)
                reply.close(engine.kv_document(job), job.text.word)
                await write(reply.flush(), more=False)
                if not reply.streams:
                    await Document(reply.document())(scope, receive, send)
        except Disconnect:
            engine.metrics.counts["cut_off"] += 1
        except Exception as error:
            refused = error if isinstance(error, Refused) else fault(error)
            if not has_begun:
                raise refused from None
            scope["wire"].cycle.keep_alive = False
            await write(reply.error_event(refused), more=False)

    async def _watch(self, receive: Callable) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.put(Disconnect())

    async def _follow(
        self, engine: Engine, reply: Reply, job: Job, write: Callable[[bytes], Awaitable]
    ) -> None:
        """Write a reply up to its last token. Raises Disconnect, Refused, and what the engine has raised."""
        engine.submit(job)
        while (item := await self._items.get()) is not None:
            if isinstance(item, Exception):
                raise item
            if isinstance(item, Start):
                reply.begin(item)
            elif isinstance(item, Token):
                self._first_token = self._first_token or time.monotonic()
                reply.take(item)
            else:
                reply.wait(*item)
            await write(reply.flush())

    def _counts(self, engine: Engine, reply: Reply, job: Job) -> str:
        """Count a reply that has begun, and return its part of the log's line."""
        if (start := reply.prompt) is None:
            return ""
        metrics, total, reused = engine.metrics, start.prompt_tokens, start.cached_tokens
        metrics.counts.update(
            prompt_tokens=total, cached_tokens=reused, generated_tokens=reply.count
        )
        if self._first_token is not None:
            metrics.took("first_token", self._first_token - self._arrival_time)
        metrics.took("duration", time.monotonic() - self._arrival_time)
        dropped = f", {job.dropped} messages dropped" if job.dropped else ""
        return f": {total} tokens in, {reused} reused, {reply.count} out{dropped}"
