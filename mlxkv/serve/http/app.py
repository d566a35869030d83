"""The ASGI application: access and other checks before a body is read, routes, and streamed replies."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route, Router
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxkv.serve.apis import anthropic
from mlxkv.serve.apis.reply import Reply
from mlxkv.serve.engine import Engine
from mlxkv.serve.http.connection import DRAIN, PACE, SECONDS, Limits, late
from mlxkv.serve.models import Metrics, Models
from mlxkv.serve.options import LOOPBACK, ServeOptions
from mlxkv.serve.prompts import APIS, COUNT
from mlxkv.serve.refusals import Refused, fault
from mlxkv.serve.request import Job, Start, Token, no_model

LOG = logging.getLogger("mlxkv.serve")
METHODS = ("GET", "HEAD", "POST", "OPTIONS")
ALLOW = ", ".join(METHODS)
TARGET, FIELDS = 8 << 10, 100  # bytes of a request's target; header fields
PAUSE = 1.0  # seconds without data after which draining a refused body stops and its connection is closed
# HTML, CSS and native JavaScript modules, served without a build step.
PAGE = Path(__file__).with_name("page")
# A model's text must never run as script: no inline code, no markup from text except through DOMPurify's policy, no
# requests to other hosts (the URL of an image in a reply could leak the chat).
POLICY = (
    "default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
)
PAGE_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
}
# Paths without a key: they serve no client data.
OPEN, OPEN_FOLDER = ("/health", "/"), "/page/"
STREAM = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


# -- access: host, origin and API key, with a rate limit on wrong keys; the tenant whose caches a request shares

FREE, RATE = 10, 1.0  # burst of wrong keys per address, then wrong keys per second
LONG = 16  # characters from which a key is too long to guess
ADDRESSES = 1024  # most recent addresses remembered
HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^\s@:/?#\[\]\\]+)(:\d{0,5})?")
ROUNDS = 100_000  # slows down guessing a key from file names


class Keys:
    """Compares keys in constant time, with a rate limit per address after `FREE` wrong keys. At the limit, only keys of
    at least `LONG` characters are compared: they cannot be guessed, and their owners may share the address. Not
    thread-safe.

    wrong: keys refused since the start.
    """

    def __init__(self):
        self.wrong = 0
        self._debts: OrderedDict[str, tuple[float, float]] = OrderedDict()  # wrong keys, time

    def check(self, given: str, keys: tuple[str, ...], peer: str) -> None:
        """Check a client's key, "" for none. Raises Refused."""
        now, who = time.monotonic(), _network(peer)
        debt, then = self._debts.get(who, (0.0, now))
        debt = max(0.0, debt - (now - then) * RATE)
        is_guessing = given and debt > FREE - 1
        same = [
            hmac.compare_digest(_digest(given), _digest(key))
            for key in keys
            if len(key) >= LONG or not is_guessing
        ]
        if any(same):  # compared with all of them, whichever it is
            return
        if is_guessing:
            wait = ceil((debt - FREE + 1) / RATE)
            reason = f"[Authorization] too many wrong keys from this address; wait {wait} s"
            raise Refused(429, reason, "invalid_api_key", retry=wait)
        if given:  # a missing key is no guess: pages prompt for one after the error
            self._debts[who] = (debt + 1, now)
            self._debts.move_to_end(who)
            if len(self._debts) > ADDRESSES:
                self._debts.popitem(last=False)
            self.wrong += 1
        raise Refused(401, "[Authorization] missing or wrong API key", "invalid_api_key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()  # equal lengths for the comparison


def _network(peer: str) -> str:
    """Return the IPv4 address, or the /64 network of an IPv6 address: one customer owns all of it."""
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return peer
    if address.version == 4:
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((int(address) >> 64 << 64, 64)))


class Origins(CORSMiddleware):
    """Answers preflights, with the way on for origins that are not allowed."""

    def preflight_response(self, request_headers: Headers) -> Response:
        answer, origin = super().preflight_response(request_headers), request_headers["Origin"]
        if self.is_allowed_origin(origin):
            return answer
        return JSONDocument(_foreign(origin).body(), answer.status_code, self.preflight_headers)


def _foreign(origin: str) -> Refused:
    return Refused(403, f"[Origin] {origin[:80]} may not ask; see --allow-origin")


def check_host(headers: Mapping[str, str], options: ServeOptions, method: str = "GET") -> None:
    """Reject requests from web pages that are not allowed, except followed links. Raises Refused."""
    host = headers.get("Host") or ""
    match = HOST.fullmatch(host)
    name = match["name"].strip("[]").lower() if match else ""
    if options.local and name not in (*LOOPBACK, options.host):
        # DNS rebinding: a web page's host name that resolves to this machine.
        raise Refused(
            403,
            f"[Host] this server is for this machine alone; got {host[:80]!r}; to let other machines and containers "
            "in, start it with --host 0.0.0.0 --api-key KEY",
        )
    origin = headers.get("Origin")
    if origin is None and method == "POST" and headers.get("Sec-Fetch-Site") == "cross-site":
        origin = "a page of another site"
    allowed = (f"http://{host}", f"https://{host}", *options.origins)
    if origin is not None and origin not in allowed and "*" not in options.origins:
        raise _foreign(origin)


def given_key(headers: Mapping[str, str]) -> str:
    """Return the key in the header Authorization, or in Anthropic's x-api-key; "" for none."""
    value = headers.get("Authorization") or headers.get("x-api-key") or ""
    scheme, _, key = value.partition(" ")
    return (key if scheme.lower() == "bearer" else value).strip()


# Cached-token counts and time to first token reveal earlier prompts, so tenants share no caches.
def tenant(key: str | None, user: str = "", salt: str = "") -> str:
    """Return the tenant's name, a digest of API key, user and salt that reveals none of them; "" if all are
    missing."""
    if not (key or user or salt):
        return ""
    parts = [_mark(key) if key else "", user, salt]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@lru_cache(1024)
def _mark(key: str) -> str:
    return hashlib.pbkdf2_hmac("sha256", key.encode(), b"mlxkv tenant", ROUNDS).hex()


# -- requests


class RequestGuard:
    """Checks the path and access of each request before its body is read; sets the headers of all replies."""

    def __init__(self, options: ServeOptions, keys: Keys, limits: Limits, app: ASGIApp):
        self._options, self._keys, self._limits, self._app = options, keys, limits, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        start, status, is_checked = time.monotonic(), 0, False
        is_complete = "transfer-encoding" not in request.headers
        is_complete = is_complete and request.headers.get("content-length", "0") == "0"
        scope["app"] = self  # makes Starlette's router raise for an unknown path
        request.state.start = start

        async def hear() -> Message:
            nonlocal is_complete
            message = await receive()
            is_complete = is_complete or not message.get("more_body", False)
            return message

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._limits.responses[status] += 1
                if not is_checked or not is_complete:
                    # The body was not read to its end, so the start of the next request is unknown.
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            elif not is_complete and not message.get("more_body", False):
                await send({**message, "more_body": True})
                if status != 408:  # a client that is still sending must be able to read the reply
                    await _drain(receive)
                message = {"type": "http.response.body"}
            await send(message)

        try:
            self._check(request)
            is_checked = True
            await self._app(scope, hear, answer)
        except ClientDisconnect:
            pass
        except Exception as error:
            if status:  # its reply has begun
                logging.exception("a request failed")
            else:
                await refusal(request, error)(scope, hear, answer)
        finally:
            counts = scope.get("counts", "")
            if status == 401 and request.client:
                counts = f" from {request.client.host}"
            level = logging.INFO if counts or status >= 400 else logging.DEBUG
            seconds = time.monotonic() - start
            line = f"{request.method[:20]} {scope['path'][:80]} {status or 'cut off'}{counts}"
            LOG.log(level, f"{line}, {seconds:.2f} s")

    def _check(self, request: Request) -> None:
        """Check the head of a request. Raises Refused."""
        options, headers, scope = self._options, request.headers, request.scope
        target = scope["raw_path"].decode()
        size = len(target) + len(scope["query_string"])
        if not scope["http_version"].startswith("1."):
            version = scope["http_version"]
            raise Refused(505, f"[request] HTTP {version} is not spoken here; choose 1.1")
        if size > TARGET:
            raise Refused(414, f"[request] a target of {size} bytes; at most {TARGET}")
        if len(headers) > FIELDS:
            raise Refused(431, f"[request] {len(headers)} header fields; at most {FIELDS}")
        length, coded = headers.get("content-length"), "transfer-encoding" in headers
        if coded and (length is not None or scope["http_version"] == "1.0"):
            raise Refused(400, "[Transfer-Encoding] with a Content-Length, or in HTTP/1.0")
        if request.method == "POST" and not coded and length is None:
            raise Refused(411, "[Content-Length] missing")
        if length is not None and int(length) > (most := self._limits.body):
            raise _too_large(int(length), most)
        if not target.startswith("/"):
            raise Refused(400, "[request] its target is not a path")
        check_host(headers, options, request.method)
        is_open = scope["path"] in OPEN or scope["path"].startswith(OPEN_FOLDER)
        if options.api_keys and not is_open:
            peer = request.client.host if request.client else ""
            self._keys.check(given_key(headers), options.api_keys, peer)
        if request.method not in METHODS:
            method = request.method[:20]
            raise Refused(501, f"[request] {method} is not known; choose from {ALLOW}")


def refusal(request: Request, error: Exception) -> Response:
    """Return an error response in the format of the request's API."""
    if isinstance(error, HTTPException):  # raised by Starlette's router
        if request.method == "POST":
            error = Refused(
                404,
                f"[path] nothing here to POST to; got {request.scope['path'][:60]}; chats go to /v1/chat/completions, "
                "/v1/responses or /v1/messages; embeddings and ollama's API are not served",
            )
        elif error.status_code == 405:
            allowed = ", ".join(sorted((error.headers or {}).get("Allow", "GET, HEAD").split(", ")))
            error = Refused(405, f"[{request.scope['path']}] takes {allowed}")
        else:
            error = Refused(404, "[path] nothing here; see /v1/models, /v1/kv, /health, /metrics")
    refused = error if isinstance(error, Refused) else fault(error)
    headers = {} if refused.retry is None else {"Retry-After": str(refused.retry)}
    if refused.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if refused.status == 405:
        headers["Allow"] = allowed
    is_anthropic = anthropic.speaks(request.scope["path"], request.headers.keys())
    body = anthropic.error_body(refused) if is_anthropic else refused.body()
    return JSONDocument(body, refused.status, headers)


def _too_large(count: int, limit: int) -> Refused:
    return Refused(413, f"[body] {count} bytes are too many; at most {limit}", "too_large")


async def _drain(receive: Receive) -> None:
    """Read and discard the rest of a body while data arrives."""
    count, message, loop = 0, {"more_body": True}, asyncio.get_running_loop()
    end = loop.time() + SECONDS
    with suppress(TimeoutError):
        async with asyncio.timeout(PAUSE) as deadline:
            while message.get("more_body", False) and count < DRAIN:
                message = await receive()
                count += len(message.get("body", b""))
                deadline.reschedule(min(end, loop.time() + PAUSE))


async def body_of(request: Request, limits: Limits) -> bytes:
    """Read a request's body. Raises Refused, and ClientDisconnect if the client has disconnected."""
    data, start = bytearray(), asyncio.get_running_loop().time()
    deadline = asyncio.timeout(SECONDS)
    try:
        async with deadline:
            limits.bodies[deadline] = 0
            async for part in request.stream():
                data += part
                if len(data) > limits.body:
                    raise _too_large(len(data), limits.body)
                limits.add_body(deadline, len(part))
                if deadline in limits.bodies:
                    deadline.reschedule(start + SECONDS + len(data) / PACE)
    except TimeoutError:
        if deadline in limits.bodies:
            raise late(len(data), request.client) from None
        raise Refused(503, "[serve] too much arrives at once", "busy", retry=1) from None
    finally:
        limits.bodies.pop(deadline, None)
    return bytes(data)


class JSONDocument(JSONResponse):
    """A JSON response in ASCII: a model may write lone surrogates, which UTF-8 cannot encode."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode()


class ReplyStream:
    """The reply to one request, as an ASGI application. key: the client's API key. is_operator: whether the client may
    see other clients' load. start: `time.monotonic()` when the request began."""

    def __init__(
        self, models: Models, raw: bytes, key: str | None, is_operator: bool, start: float
    ):
        self._models, self._raw, self._key, self._is_operator = models, raw, key, is_operator
        self._start = start
        self._first_token: float | None = None
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue = asyncio.Queue()

    def put(self, item: Any) -> None:
        """Pass a job's event from the generation thread to the event loop."""
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:  # the loop has ended, and the client got its error
            pass

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply: Reply | None = None
        has_begun = False

        async def write(data: bytes, more: bool = True) -> None:
            nonlocal has_begun
            if reply is None or not reply.streams:
                return
            if not has_begun:
                await send({"type": "http.response.start", "status": 200, "headers": STREAM})
                has_begun = True
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async with self._models.read(scope["path"], self._raw, self._key, self._start) as (
                loaded_model,
                read,
            ):
                asked, prompt, dropped = read
                engine, name = loaded_model.engine, loaded_model.name
                markup = loaded_model.markup(asked, prompt.state)
                reply = APIS[scope["path"]].reply(asked, asked.pack or name, markup)
                owner = await run_in_threadpool(tenant, self._key, asked.user, asked.cache_salt)
                job = Job(asked, prompt, owner, dropped, self._is_operator, channel=self)
                job.constraint = await run_in_threadpool(engine.constraint_of, job)
                watch = asyncio.create_task(self._watch(receive))
                try:
                    await self._follow(engine, reply, job, write)
                finally:
                    watch.cancel()
                    job.cancelled = True
                    scope["counts"] = self._counts(loaded_model.metrics, reply, job)
                reply.close(engine.kv_document(job), job.text.word)
                await write(reply.flush(), more=False)
                if not reply.streams:
                    await JSONDocument(reply.document())(scope, receive, send)
        except ClientDisconnect:
            loaded_model.metrics.counts["cut_off"] += 1
        except Exception as error:
            refused = error if isinstance(error, Refused) else fault(error)
            if reply is None or not has_begun:
                raise refused from None
            await write(reply.error_event(refused), more=False)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.put(ClientDisconnect())

    async def _follow(
        self, engine: Engine, reply: Reply, job: Job, write: Callable[[bytes], Awaitable]
    ) -> None:
        """Write a reply up to its last token. Raises ClientDisconnect, Refused, and the engine's errors."""
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

    def _counts(self, metrics: Metrics, reply: Reply, job: Job) -> str:
        """Update the metrics for a reply that has begun, and return its part of the log line."""
        if not reply.has_begun:
            return ""
        total, reused = reply.prompt.prompt_tokens, reply.prompt.cached_tokens
        metrics.counts.update(
            prompt_tokens=total, cached_tokens=reused, generated_tokens=reply.count
        )
        if self._first_token is not None:
            metrics.took("first_token", self._first_token - self._start)
        metrics.took("duration", time.monotonic() - self._start)
        dropped = f", {job.dropped} messages dropped" if job.dropped else ""
        return f": {total} tokens in, {reused} reused, {reply.count} out{dropped}"


class Files(StaticFiles):
    """Static files of the chat page."""

    def file_response(self, *args, **kwargs) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(PAGE_HEADERS)
        return response


def application(models: Models, keys: Keys, limits: Limits) -> Router:
    """Return the server's router."""
    options, created = models.options, int(time.time())

    def key(request: Request) -> str | None:
        """Return the API key of an admitted request, None if the server has no keys."""
        return given_key(request.headers) if options.api_keys else None

    def is_operator(request: Request) -> bool:
        """Return whether the client may see the load of all clients: it has the first key, or there are no keys."""
        return key(request) in (None, *options.api_keys[:1])

    async def reply(request: Request) -> Callable:
        raw = await body_of(request, limits)
        return ReplyStream(models, raw, key(request), is_operator(request), request.state.start)

    async def count(request: Request) -> Response:
        raw = await body_of(request, limits)
        async with models.read(COUNT, raw, key(request), request.state.start) as (_, read):
            return JSONDocument({"input_tokens": len(read.prompt.tokens)})

    async def index(request: Request) -> Response:
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    async def health(request: Request) -> Response:
        if models.first.engine.is_healthy:
            return JSONDocument({"status": "ok"})
        return JSONDocument({"status": "unavailable"}, 503)

    async def kv(request: Request) -> Response:
        return JSONDocument(models.kv(is_operator(request)))

    async def metrics(request: Request) -> Response:
        if not is_operator(request):
            raise Refused(403, "[/metrics] tells of all clients: it is for the first --api-key")
        return Response(
            models.metrics(limits.responses, keys.wrong), media_type="text/plain; version=0.0.4"
        )

    async def list_models(request: Request) -> Response:
        name = request.path_params.get("name", "").strip("/")
        if name and name not in models.listed:
            raise no_model(name[:80], models.listed)
        if anthropic.speaks(request.scope["path"], request.headers.keys()):
            return JSONDocument(anthropic.models(models.listed, name))
        model = {"object": "model", "created": created, "owned_by": "mlxkv"}
        data = [{"id": each, **model} for each in models.listed]
        return JSONDocument({"id": name, **model} if name else {"object": "list", "data": data})

    return Router(
        [
            *(Route(path, count if path == COUNT else reply, methods=["POST"]) for path in APIS),
            Route("/", index),
            Mount("/page", Files(directory=PAGE, follow_symlink=True)),
            Route("/health", health),
            Route("/v1/kv", kv),
            Route("/metrics", metrics),
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", list_models),
        ],
        redirect_slashes=False,
    )
