"""One connection: checks, mlx-lm's handler for replies, and pages about the model and its caches."""

from __future__ import annotations

import hmac
import json
import logging
import select
import socket
import time
from dataclasses import asdict, fields
from importlib.resources import files
from io import BufferedReader
from pathlib import Path
from urllib.parse import unquote, urlsplit

import mlx.core as mx
from mlx_lm import server

from mlxkv import __version__
from mlxkv.metal.launch import backend
from mlxkv.serve.engine import Engine
from mlxkv.serve.http.arrival import Arriving, read_body
from mlxkv.serve.http.caller import Answer, Caller, Left
from mlxkv.serve.http.request import Request, Served, parse
from mlxkv.serve.metrics import Metrics
from mlxkv.serve.options import LOOPBACK, ServeOptions
from mlxkv.serve.refusals import Refused, fault

CHAT = ("/v1/chat/completions", "/chat/completions")
TEXT = ("/v1/completions",)
PAGE = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
OPEN = ("/health", *PAGE)  # without a key: nothing there belongs to a client
# mlx-lm's handler keeps a request as attributes with the same names, but for these.
APART = ("chat", "include_usage", "stop", "prompt", "messages", "tools")
SETTINGS = [one.name for one in fields(Request) if one.name not in APART]


class Site:
    """What all connections share."""

    def __init__(self, options: ServeOptions, engine: Engine, metrics: Metrics):
        self.options, self.engine, self.metrics = options, engine, metrics
        self.loaded = engine.started()
        name = Path(self.loaded.name).expanduser()
        # The name of a local folder, but not where it lies.
        self.name = name.resolve().name if name.is_dir() else self.loaded.name
        self.fingerprint = server.get_system_fingerprint()
        self.served = Served(
            model=self.name,
            kv=self.loaded.kv_name,
            longest=self.loaded.context or 1 << 20,
            max_tokens=options.max_tokens,
            vocabulary=engine.vocabulary,
        )

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
            "processes": engine.ranks.size,  # bytes below are those of one
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
        """Yield the numbers of /v1/kv for the metrics: (name, help, value)."""
        found = self.kv()
        for name, value in found["memory"].items():
            yield f"kv_{name}", "Of KV caches (mlx: of all arrays).", value
        for name, value in found["sessions"].items():
            yield f"sessions_{name}", "Of the prompt cache.", value
        for name, value in (found["disk"] or {}).items():
            yield f"disk_{name}", "Of sessions on disk.", value


class Handler(server.APIHandler):
    """mlx-lm's handler behind checks: of its routes only replies are left to it."""

    timeout = 30  # seconds for a request to arrive, and for each part of a reply to leave
    server_version = f"mlxkv/{__version__}"
    sys_version = ""

    def __init__(self, site: Site, *args, **kwargs):
        self.site, self.started = site, time.monotonic()
        self._status, self._begun, self._called = 0, False, False
        super().__init__(site.engine, *args, system_fingerprint=site.fingerprint, **kwargs)

    def setup(self):
        super().setup()
        self.rfile.close()
        self.rfile = BufferedReader(Arriving(self.connection, self.timeout))
        self.command, self.requestline, self.headers = "", "", {}  # before they are read

    def handle(self):
        try:
            super().handle()
        except Refused as refused:  # the head did not arrive in time
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
        if self._begun:  # a stream is under way, where OpenAI's clients look for errors, too
            self.wfile.write(f"data: {json.dumps(refused.body())}\n\n".encode())
            return
        self._headers_buffer = []  # drop the headers of the reply that failed
        headers = {} if refused.retry is None else {"Retry-After": str(refused.retry)}
        if refused.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        self._send_json(refused.body(), refused.status, headers)

    # -- checks

    def _guard(self, path: str) -> None:
        """Check the headers Host, Origin and Authorization. Raises Refused."""
        options = self.site.options
        host = self.headers.get("Host") or ""
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            name = ""
        if options.local and name not in (*LOOPBACK, options.host):
            # DNS rebinding: a web page's own name that was made to point here.
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
        data = files("mlxkv.serve.http").joinpath(name).read_bytes()
        headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache"}
        self._send(200, data, kind, headers)

    def _models(self, wanted: str) -> None:
        name = self.site.name
        one = {"id": name, "object": "model", "created": self.created, "owned_by": "mlxkv"}
        if wanted and wanted != name:
            raise Refused(404, f"[model] no such model; choose {name!r}", "model_not_found")
        self._send_json(one if wanted else {"object": "list", "data": [one]})

    def do_POST(self):
        path = urlsplit(self.path).path
        try:
            self._guard(path)
            if path not in (*CHAT, *TEXT):
                raise Refused(404, "[path] nothing here to POST to")
            length = self.headers.get("Content-Length")
            raw = read_body(self.rfile, length, self.site.options.body_bytes)
            self.server.door.arrived(self.connection)
            request = parse(raw, path in CHAT, self.site.served)
            self.site.metrics.add(active=1)
            try:
                self._reply(request)
            finally:
                self.site.metrics.add(active=-1)
        except Refused as refused:
            self._refuse(refused)
        except Answer as answer:
            self._refuse(answer.refused)
        except Left as left:
            raise ConnectionAbortedError(str(left)) from None
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:  # of mlxkv or of mlx-lm's handler
            logging.exception("a request failed")
            self._refuse(fault(error))

    def _reply(self, request: Request) -> None:
        """Hand a request to mlx-lm's `handle_completion`, which writes the reply."""
        limit, active = self.site.options.max_requests, self.site.metrics.active
        if active > limit:
            raise Refused(429, f"[--max-requests] {active - 1} under way", "busy", retry=1)
        for name in SETTINGS:
            setattr(self, name, getattr(request, name))
        self.stream_options = {"include_usage": request.include_usage}
        self.requested_model, self.requested_draft_model = self.site.name, "default_model"
        self.num_draft_tokens, self.adapter = 0, None
        if request.chat:
            self.body = {"messages": request.messages, "tools": request.tools}
            completion = self.handle_chat_completions()
        else:
            self.body = {"prompt": request.prompt}
            completion = self.handle_text_completions()
        caller = Caller(self.site.engine, self.started, self.gone)
        self.response_generator = caller
        try:
            self.handle_completion(completion, request.stop)
        finally:
            caller.stop()  # mlx-lm's does not when the head of the reply cannot be written

    def generate_response(self, text, finish_reason, *args, **kwargs):
        self._called = self._called or bool(kwargs.get("tool_calls"))
        if finish_reason == "tool_calls" and not self._called:  # no call could be read
            finish_reason = "stop"
        response = super().generate_response(text, finish_reason, *args, **kwargs)
        if finish_reason is not None:
            response["kv"] = self.response_generator.numbers()
        return response

    def completion_usage_response(self, *args, **kwargs):
        response = super().completion_usage_response(*args, **kwargs)
        return response | {"kv": self.response_generator.numbers()}

    def gone(self) -> bool:
        """Whether the client has hung up."""
        try:
            if not select.select([self.connection], [], [], 0)[0]:
                return False
            return not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True
