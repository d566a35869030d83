"""One connection: what may come in, mlx-lm's handler for completions, and pages about the caches."""

from __future__ import annotations

import hmac
import json
import logging
import select
import socket
import time
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from io import BufferedReader, BytesIO
from pathlib import Path
from urllib.parse import unquote, urlsplit

import mlx.core as mx
from mlx_lm import server

from mlxkv import __version__
from mlxkv.metal.launch import backend
from mlxkv.serve import body
from mlxkv.serve.arrival import Arriving, read_body
from mlxkv.serve.engine import Engine, Ticket
from mlxkv.serve.metrics import Metrics
from mlxkv.serve.options import LOOPBACK, Options
from mlxkv.serve.refusals import Refused, fault

CHAT = ("/v1/chat/completions", "/chat/completions")
TEXT = ("/v1/completions",)
PAGE = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
OPEN = ("/health", *PAGE)  # need no key: nothing of anybody's is in them


class Answer(BaseException):
    """Leaves mlx-lm's handler, which would answer any Exception with 404."""

    def __init__(self, refused: Refused):
        super().__init__(refused.message)
        self.refused = refused


class Left(BaseException):
    """The client has hung up; for the same reason no Exception."""


class Site:
    """What all connections share."""

    def __init__(self, options: Options, engine: Engine, metrics: Metrics):
        self.options, self.engine, self.metrics = options, engine, metrics
        self.loaded = engine.started()
        name = Path(self.loaded.name).expanduser()
        self.name = name.resolve().name if name.is_dir() else self.loaded.name  # no folder of ours
        self.fingerprint = server.get_system_fingerprint()

    def kv(self) -> dict:
        """The document of /v1/kv."""
        engine, loaded = self.engine, self.loaded
        memory, sessions, disk = engine.memory, engine.sessions, engine.sessions.disk
        kept = None
        if disk is not None:
            counts = {"saved": disk.saved, "found": disk.found, "failed": disk.failed}
            kept = {"files": len(disk.entries), "bytes": disk.nbytes, **counts}
        return {
            "model": self.name,
            "kv": loaded.kv_name,
            "backend": backend(),
            "version": __version__,
            "context": loaded.context,
            "batched": engine.model_provider.is_batchable,
            "processes": engine.ranks.size,  # bytes are of one of them
            "report": loaded.report(),
            "layers": [asdict(layer) for layer in loaded.layers],
            "memory": {
                "bound_bytes": memory.bound,
                "promised_bytes": memory.promised,
                "active_bytes": engine.kv_bytes,
                "sessions_bytes": sessions.nbytes,
                "sessions_bytes_apart": sessions.bytes_apart,
                "bytes": engine.kv_bytes + sessions.nbytes,
                "mlx_bytes": mx.get_active_memory(),  # all arrays, weights too
                "bytes_fp16": engine.kv_bytes_fp16 + sessions.bytes_fp16,
            },
            "sessions": {
                "count": len(sessions),
                "lookups": sessions.lookups,
                "hits": sessions.hits,
                "hit_rate": round(sessions.hits / max(1, sessions.lookups), 4),
                "tokens": sessions.tokens,
                "tokens_found": sessions.tokens_found,
                "evicted": sessions.evicted,
            },
            "disk": kept,
            "active_requests": self.metrics.active,
        }

    def gauges(self):
        """For the metrics: what is in /v1/kv."""
        found = self.kv()
        for name, value in found["memory"].items():
            yield f"kv_{name}", "Of KV caches (mlx: of all arrays).", value
        for name, value in found["sessions"].items():
            yield f"sessions_{name}", "Of the prompt cache.", value
        for name, value in (found["disk"] or {}).items():
            yield f"disk_{name}", "Of sessions on disk.", value


class Handler(server.APIHandler):
    """mlx-lm's handler behind checks."""

    timeout = 30  # seconds for a request to arrive, and for each part of a reply to leave
    server_version = f"mlxkv/{__version__}"
    sys_version = ""

    def __init__(self, site: Site, *args, **kwargs):
        self.site, self.ticket, self.started = site, Ticket(), time.monotonic()
        self.stream, self._status = False, 0
        super().__init__(site.engine, *args, system_fingerprint=site.fingerprint, **kwargs)

    def setup(self):
        super().setup()
        self.rfile.close()
        self.rfile = BufferedReader(Arriving(self.connection, self.timeout))
        self.command, self.requestline, self.headers = "", "", {}  # until they are read

    def handle(self):
        try:
            super().handle()
        except Refused as refused:  # in the head
            self.request_version = self.protocol_version
            self._refuse(refused)

    def parse_request(self) -> bool:
        whole = super().parse_request()
        if whole and self.command != "POST":
            self.server.door.arrived(self.connection)
        return whole

    # -- answering

    def log_message(self, format, *args):
        logging.debug(format, *args)

    def send_response(self, code, message=None):
        self._status = code
        super().send_response(code, message)

    def end_headers(self):
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()
        self.site.metrics.answered(self._status)
        self._begun = True

    _begun = _called = False

    def _send(self, status: int, data: bytes, kind: str, headers: dict | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self._set_cors_headers()
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _send_json(self, document: dict, status: int = 200, headers: dict | None = None) -> None:
        self._send(status, json.dumps(document).encode(), "application/json", headers)

    def _refuse(self, refused: Refused) -> None:
        if self._begun:  # a stream is under way: the client's library finds it there
            self.wfile.write(f"data: {json.dumps(refused.body())}\n\n".encode())
            return
        self._headers_buffer = []  # those of a reply that there will not be
        headers = {} if refused.retry is None else {"Retry-After": str(refused.retry)}
        if refused.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        self._send_json(refused.body(), refused.status, headers)

    # -- checks

    def _guard(self, path: str) -> None:
        """Who may ask. Raises Refused."""
        options = self.site.options
        host = self.headers.get("Host") or ""
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            name = ""
        if options.local and name not in (*LOOPBACK, options.host):
            # A name that was made to point here by somebody else's page.
            raise Refused(403, "[Host] this server is for this machine alone")
        origin = self.headers.get("Origin")
        own = (f"http://{host}", f"https://{host}", *options.origins)
        if origin is not None and origin not in own and "*" not in options.origins:
            raise Refused(403, f"[Origin] {origin[:80]} may not ask; see --allow-origin")
        if options.api_key is not None and path not in OPEN:
            given = (self.headers.get("Authorization") or "").removeprefix("Bearer ").strip()
            if not hmac.compare_digest(given.encode(), options.api_key.encode()):
                raise Refused(401, "[Authorization] missing or wrong API key", "invalid_api_key")

    # -- routes

    def do_GET(self):
        path = urlsplit(self.path).path
        try:
            self._guard(path)
            if path in PAGE:
                self._page(*PAGE[path])
            elif path == "/health":
                self.handle_health_check()
            elif path == "/v1/kv":
                self._send_json(self.site.kv())
            elif path == "/metrics":
                text = self.site.metrics.text(self.site.gauges())
                self._send(200, text.encode(), "text/plain; version=0.0.4")
            elif path == "/v1/models" or path.startswith("/v1/models/"):
                self._models(unquote(path.removeprefix("/v1/models").strip("/")))
            elif path in (*CHAT, *TEXT):
                raise Refused(405, f"[{path}] takes POST")
            else:
                raise Refused(404, "[path] nothing here; see /v1/models, /v1/kv, /health, /metrics")
        except Refused as refused:
            self._refuse(refused)

    do_HEAD = do_GET

    def _page(self, name: str, kind: str) -> None:
        policy = "default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        data = files("mlxkv.serve").joinpath(name).read_bytes()
        headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache"}
        self._send(200, data, kind, headers)

    def _models(self, wanted: str) -> None:
        name = self.site.name
        one = {"id": name, "object": "model", "created": self.created, "owned_by": "mlxkv"}
        if wanted and wanted != name:
            raise Refused(404, f"[model] no such model; choose {name!r}", "model_not_found")
        self._send_json(one if wanted else {"object": "list", "data": [one]})

    def do_POST(self):
        """Check all there is to check, then hand what is left to mlx-lm's handler."""
        path, metrics = urlsplit(self.path).path, self.site.metrics
        counted = False
        try:
            self._guard(path)
            if path not in (*CHAT, *TEXT):
                raise Refused(404, "[path] nothing here to POST to")
            length = self.headers.get("Content-Length")
            raw = read_body(self.rfile, length, self.site.options.body_bytes)
            self.server.door.arrived(self.connection)
            clean = body.check(
                body.parse(raw),
                path in CHAT,
                *(self.site.name, self.site.loaded.kv_name),
                self.site.loaded.context or 1 << 20,
                self.site.engine.vocabulary,
            )
            metrics.add(active=1)
            counted = True
            if metrics.active > self.site.options.max_requests:
                raise Refused(
                    429, f"[--max-requests] {metrics.active - 1} under way", "busy", retry=1
                )
            data = json.dumps(clean).encode()
            self.path, self.rfile = path, BytesIO(data)
            self.headers.replace_header("Content-Length", str(len(data)))
            super().do_POST()
        except Refused as refused:
            self._refuse(refused)
        except Answer as answer:
            self._refuse(answer.refused)
        except Left as left:
            raise ConnectionAbortedError(str(left)) from None
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:  # of ours or of mlx-lm's handler: the client hears of it
            logging.exception("a request failed")
            self._refuse(fault(error))
        finally:
            if counted:
                metrics.add(active=-1)

    def handle_completion(self, request, stop_words):
        request.ticket = self.ticket
        self.response_generator = watch = Watch(self)
        try:
            super().handle_completion(request, stop_words)
        finally:
            watch.stop()  # mlx-lm's does, but not when the head of the reply cannot be written

    def generate_response(self, text, finish_reason, *args, **kwargs):
        self._called = self._called or bool(kwargs.get("tool_calls"))
        if finish_reason == "tool_calls" and not self._called:  # none that could be read
            finish_reason = "stop"
        response = super().generate_response(text, finish_reason, *args, **kwargs)
        if finish_reason is not None:
            response["kv"] = self.site.engine.numbers(self.ticket)
        return response

    def completion_usage_response(self, *args, **kwargs):
        response = super().completion_usage_response(*args, **kwargs)
        return response | {"kv": self.site.engine.numbers(self.ticket)}

    def gone(self) -> bool:
        """Whether the client has hung up."""
        try:
            if not select.select([self.connection], [], [], 0)[0]:
                return False
            return not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True


class Watch:
    """The engine as mlx-lm's handler sees it for one request: with a clock, and an eye on the line."""

    def __init__(self, handler: Handler):
        self.handler, self.engine = handler, handler.site.engine
        self.deadline = handler.started + handler.site.options.timeout
        self.stop = lambda: None

    def __getattr__(self, name: str):
        return getattr(self.engine, name)

    def generate(self, request, args, progress_callback=None):
        """As the engine's, with failures that mlx-lm's handler lets through."""

        def progress(done: int, total: int) -> None:
            self._check()
            if progress_callback is not None:
                progress_callback(done, total)

        self.engine.waiting.check = self._check
        try:
            ctx, responses = self.engine.generate(request, args, progress_callback=progress)
        except ConnectionError as error:
            raise Left(str(error)) from None
        except Refused as refused:
            raise Answer(refused) from None
        except Exception as error:
            raise Answer(fault(error)) from None
        self.stop = ctx.stop
        if ctx.tool_parser is not None:
            ctx.tool_parser = partial(_tool_calls, ctx.tool_parser)
        return ctx, self._timed(responses)

    def _timed(self, responses):
        site, count, first = self.handler.site, 0, None
        try:
            for response in responses:
                self._check()
                count += 1
                first = first or time.monotonic() - self.handler.started
                yield response
        except (Refused, ConnectionError, TimeoutError):
            raise
        except Exception as error:
            raise Answer(fault(error)) from None
        finally:
            ticket = self.handler.ticket
            site.metrics.add(
                prompt_tokens=ticket.prompt_tokens,
                cached_tokens=ticket.cached_tokens,
                generated_tokens=count,
            )
            site.metrics.took(first, time.monotonic() - self.handler.started)

    def _check(self) -> None:
        late = time.monotonic() > self.deadline
        if not late and not self.handler.gone():
            return
        self.handler.ticket.given_up = True
        if late:
            limit = self.handler.site.options.timeout
            raise Answer(Refused(504, f"[--timeout] took more than {limit:g} s", "timeout"))
        raise ConnectionAbortedError("the client has left")


def _tool_calls(parse, text: str, tools) -> list[dict]:
    """What `parse` reads in a model's text. mlx-lm drops what raises a ValueError, and says so."""
    found = parse(text, tools)
    calls = found if isinstance(found, list) else [found]
    for call in calls:
        named = isinstance(call, dict) and isinstance(call.get("name"), str) and call["name"]
        if not named or not isinstance(call.get("arguments"), dict):
            raise ValueError(f"a call needs a name and arguments; got {text.strip()[:80]!r}")
    return calls
