"""One request: checks, mlx-lm's handler for replies, and pages about the model and its caches."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, fields
from email.message import Message
from email.utils import formatdate
from math import isfinite
from pathlib import Path
from urllib.parse import unquote

import mlx.core as mx
from mlx_lm import server

from mlxkv import __version__
from mlxkv.metal.launch import backend
from mlxkv.models.usage import window_of
from mlxkv.serve.engine import Engine
from mlxkv.serve.http import page
from mlxkv.serve.http.access import Keys, check_host, given_key, locate
from mlxkv.serve.http.arrival import Line
from mlxkv.serve.http.caller import Answer, Caller, Left
from mlxkv.serve.http.request import Request, Served, parse
from mlxkv.serve.metrics import Metrics
from mlxkv.serve.options import ServeOptions
from mlxkv.serve.refusals import Refused, fault
from mlxkv.serve.tenants import tenant

CHAT = ("/v1/chat/completions", "/chat/completions")
TEXT = ("/v1/completions",)
OPEN = ("/health", *page.PAGE)  # without a key: nothing there belongs to a client
ALLOW = "GET, HEAD, POST, OPTIONS"
LEAST = -9999.0  # the log-probability of what cannot come, as OpenAI writes it
# mlx-lm's handler keeps a request as attributes with the same names, but for these.
APART = ("chat", "include_usage", "stop", "prompt", "messages", "tools", "continue_final_message")
SETTINGS = [one.name for one in fields(Request) if one.name not in APART]


class Site:
    """What all connections share."""

    def __init__(self, options: ServeOptions, engine: Engine, metrics: Metrics):
        self.options, self.engine, self.metrics = options, engine, metrics
        self.loaded, self.keys = engine.started(), Keys()
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

    def kv(self, whole: bool = True) -> dict:
        """The document of /v1/kv. whole: with numbers that depend on what all clients ask."""
        engine, loaded = self.engine, self.loaded
        memory, sessions, disk = engine.memory, engine.sessions, engine.sessions.disk
        kept = None
        if disk is not None:
            counts = {"saved": disk.saved, "found": disk.found, "failed": disk.failed}
            kept = {"files": len(disk.entries), "bytes": disk.nbytes, **counts}
        own = {
            "model": self.name,
            "kv": loaded.kv_name,
            "backend": backend(),
            "version": __version__,
            "context": loaded.context,
            "max_tokens": self.options.max_tokens,  # of a reply whose request names none
            "exact_tokens": window_of(loaded),  # nothing is compressed in sequences up to here
            "batched": engine.model_provider.is_batchable,
            "processes": engine.ranks.size,  # bytes below are those of one
            "report": loaded.report(),
            "steps": loaded.steps,
            "layers": [asdict(layer) for layer in loaded.layers],
            "memory": {"bound_bytes": memory.bound},
        }
        if not whole:
            return own
        return own | {
            "memory": {
                "bound_bytes": memory.bound,
                "promised_bytes": memory.promised,
                # Of the tokens that are held, by the rule of `models.usage`; 16 bits by the same.
                "bytes": engine.kv_bytes + sessions.bytes_in_use,
                "bytes_fp16": engine.kv_bytes_fp16 + sessions.bytes_fp16,
                "active_bytes": engine.kv_bytes,
                "active_bytes_fp16": engine.kv_bytes_fp16,
                "sessions_bytes": sessions.bytes_in_use,
                "sessions_bytes_fp16": sessions.bytes_fp16,
                # With room to grow; parts that sessions share count once, or (apart) each time.
                "allocated_bytes": engine.kv_allocated + sessions.nbytes,
                "active_allocated_bytes": engine.kv_allocated,
                "sessions_allocated_bytes": sessions.nbytes,
                "sessions_allocated_bytes_apart": sessions.bytes_apart,
                "mlx_bytes": mx.get_active_memory(),  # all arrays, weights too
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
        yield "wrong_keys", "API keys that were refused since the start.", self.keys.wrong


def finite(logprobs: list[float]) -> list[float | None]:
    """Log-probabilities that JSON has: minus infinity is `LEAST`, what is no number null."""
    return [max(x, LEAST) if isfinite(x) or x < 0 else None for x in logprobs]


def finite_steps(steps: list[tuple[dict, ...]]) -> list[tuple[dict, ...]]:
    """The same for the best tokens of each step."""
    return [tuple(one | {"logprob": finite([one["logprob"]])[0]} for one in step) for step in steps]


class Handler(server.APIHandler):
    """Answers one request: mlx-lm's handler behind checks; of its routes only replies are left to it.

    mlx-lm's is one of `http.server`, which reads and writes here through `line` instead.
    """

    timeout = 30  # seconds for a request to arrive, and for each part of a reply to leave

    def __init__(self, site: Site, line: Line):
        self.site, self.line, self.wfile = site, line, line
        self.started, self.created = line.began, int(time.time())
        self.response_generator, self.system_fingerprint = site.engine, site.fingerprint
        self._status, self._begun, self._called = 0, False, False
        self._headers: list[tuple[str, str]] = []
        self.command, self.target, self.headers = "", "", Message()
        if line.head is not None:
            self.command, self.target = line.head.method.decode(), line.head.target.decode()
            for name, value in line.head.headers:
                self.headers.add_header(name.decode(), value.decode("latin-1"))

    def admit(self) -> None:
        """Check where a request goes and who asks, before its body is read. Raises Refused."""
        path, host = locate(self.target, self.headers)
        options = self.site.options
        check_host(host, self.headers, options)
        # A preflight has no key: it asks whether one may be sent.
        if options.api_keys and path not in OPEN and self.command != "OPTIONS":
            self.site.keys.check(given_key(self.headers), options.api_keys, self.line.peer)

    @property
    def _key(self) -> str | None:
        """The API key of a request that was admitted, None where the server has none."""
        return given_key(self.headers) if self.site.options.api_keys else None

    @property
    def _operator(self) -> bool:
        """Whether this client may know what all of them do together: it has the first key, or nobody has one."""
        return self._key in (None, *self.site.options.api_keys[:1])

    def answer(self) -> None:
        """Write the reply. Raises ConnectionError or TimeoutError if the client has left."""
        try:
            if self.line.refused is not None:
                raise self.line.refused
            self._route()
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
        self.line.finish()

    # -- writing; mlx-lm's handler calls these, too

    def send_response(self, code, message=None):
        self._status = code
        self._headers = [("Server", f"mlxkv/{__version__}"), ("Date", formatdate(usegmt=True))]

    def send_header(self, keyword, value):
        self._headers.append((keyword, str(value)))

    def end_headers(self):
        self.send_header("X-Content-Type-Options", "nosniff")
        self.site.metrics.answered(self._status)
        self._begun = True
        self.line.start(self._status, self._headers)

    def _set_cors_headers(self):
        allowed, origin = self.site.options.origins, self.headers.get("Origin")
        if "*" in allowed:
            self.send_header("Access-Control-Allow-Origin", "*")
        elif origin in allowed:
            self.send_header("Access-Control-Allow-Origin", origin)
            self.send_header("Vary", "Origin")

    def _send(self, status: int, data: bytes, kind: str, headers: dict | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self._set_cors_headers()
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _send_json(self, document: dict, status: int = 200, headers: dict | None = None) -> None:
        data = json.dumps(document, allow_nan=False).encode()
        self._send(status, data, "application/json", headers)

    def _refuse(self, refused: Refused) -> None:
        if self._begun:  # a stream is under way, where OpenAI's clients look for errors, too
            self.line.last = True
            self.wfile.write(f"data: {json.dumps(refused.body())}\n\n".encode())
            return
        headers = {} if refused.retry is None else {"Retry-After": str(refused.retry)}
        if refused.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if refused.status == 405:
            headers["Allow"] = ALLOW
        self._send_json(refused.body(), refused.status, headers)

    # -- routes

    def _route(self) -> None:
        path, _ = locate(self.target, self.headers)
        replies = path in (*CHAT, *TEXT)
        if self.command == "OPTIONS":
            self._preflight()
        elif self.command == "POST" and replies:
            self._reply(parse(bytes(self.line.body), path in CHAT, self.site.served))
        elif self.command in ("GET", "HEAD") and not replies:
            self._page(path)
        elif self.command in ("GET", "HEAD"):
            raise Refused(405, f"[{path}] takes POST")
        elif self.command == "POST":
            raise Refused(404, "[path] nothing here to POST to")
        else:
            raise Refused(501, f"[request] {self.command[:20]} is not known; choose from {ALLOW}")

    def _preflight(self) -> None:
        self.send_response(204)
        self._set_cors_headers()
        self.send_header("Access-Control-Allow-Methods", ALLOW)
        self.send_header("Access-Control-Allow-Headers", "*, Authorization")  # "*" leaves that out
        self.send_header("Access-Control-Max-Age", "600")
        self.end_headers()

    def _page(self, path: str) -> None:
        site = self.site
        if path in page.PAGE:
            self._send(200, *page.read(path), page.HEADERS)
        elif path == "/health":
            well = site.engine.is_healthy
            self._send_json({"status": "ok" if well else "unavailable"}, 200 if well else 503)
        elif path == "/v1/kv":
            self._send_json(site.kv(self._operator))
        elif path == "/metrics" and not self._operator:
            raise Refused(403, "[/metrics] tells of all clients: it is for the first --api-key")
        elif path == "/metrics":
            text = site.metrics.text(site.gauges())
            self._send(200, text.encode(), "text/plain; version=0.0.4")
        elif path == "/v1/models" or path.startswith("/v1/models/"):
            self._models(unquote(path.removeprefix("/v1/models").strip("/")))
        else:
            raise Refused(404, "[path] nothing here; see /v1/models, /v1/kv, /health, /metrics")

    def _models(self, wanted: str) -> None:
        name = self.site.name
        one = {"id": name, "object": "model", "created": self.created, "owned_by": "mlxkv"}
        if wanted and wanted != name:
            raise Refused(404, f"[model] no such model; choose {name!r}", "model_not_found")
        self._send_json(one if wanted else {"object": "list", "data": [one]})

    def _reply(self, request: Request) -> None:
        """Write the reply to a request, if it is not one too many."""
        limit, metrics = self.site.options.max_requests, self.site.metrics
        metrics.add(active=1)
        try:
            if metrics.active > limit:
                others = metrics.active - 1
                raise Refused(429, f"[--max-requests] {others} under way", "busy", retry=1)
            self._complete(request)
        finally:
            metrics.add(active=-1)

    def _complete(self, request: Request) -> None:
        """Hand a request to mlx-lm's `handle_completion`, which writes the reply."""
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
        whose = tenant(self._key, request.user, request.cache_salt)
        more = request.continue_final_message
        caller = Caller(self.site.engine, self.started, self.line.gone, whose, more)
        self.response_generator = caller
        try:
            self.handle_completion(completion, request.stop)
        finally:
            caller.stop()  # mlx-lm's does not when the head of the reply cannot be written

    def generate_response(self, text, finish_reason, *args, **kwargs):
        self._called = self._called or bool(kwargs.get("tool_calls"))
        if finish_reason == "tool_calls" and not self._called:  # no call could be read
            finish_reason = "stop"
        for name, plain in (("token_logprobs", finite), ("top_tokens", finite_steps)):
            if kwargs.get(name):
                kwargs[name] = plain(kwargs[name])
        response = super().generate_response(text, finish_reason, *args, **kwargs)
        if finish_reason is not None:
            response["kv"] = self.response_generator.numbers()
        return response

    def completion_usage_response(self, *args, **kwargs):
        response = super().completion_usage_response(*args, **kwargs)
        return response | {"kv": self.response_generator.numbers()}
