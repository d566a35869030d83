"""One request: checks, mlx-lm's handler for replies, and pages about the model and its caches."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from email.utils import formatdate
from urllib.parse import unquote

from mlxkv import __version__
from mlxkv.serve.apis import anthropic, routes
from mlxkv.serve.apis.speaker import Dictation, Speaker
from mlxkv.serve.http import page
from mlxkv.serve.http.access import check_host, given_key, locate
from mlxkv.serve.http.arrival import Line
from mlxkv.serve.http.caller import Answer, Caller, Left
from mlxkv.serve.http.completion import Completion
from mlxkv.serve.http.request import Request, parse
from mlxkv.serve.http.site import Site
from mlxkv.serve.refusals import Refused, fault
from mlxkv.serve.tenants import tenant

CHAT = ("/v1/chat/completions", "/chat/completions")
TEXT = ("/v1/completions",)
OPEN = ("/health", *page.PAGE)  # without a key: nothing there belongs to a client
ALLOW = "GET, HEAD, POST, OPTIONS"


class Handler(Completion):
    """Answers one request: mlx-lm's handler behind checks; of its routes only replies are left to it.

    mlx-lm's is one of `http.server`, which reads and writes here through `line` instead.
    """

    timeout = 30  # seconds for a request to arrive, and for each part of a reply to leave

    def __init__(self, site: Site, line: Line):
        self.site, self.line, self.wfile = site, line, line
        self.started, self.created = line.began, int(time.time())
        self.response_generator, self.system_fingerprint = site.engine, site.fingerprint
        self._status, self._begun = 0, False
        self.speaker: Speaker | None = None
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
        """Return whether this client may know what all of them do together: it has the first key, or nobody has one."""
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
            said = f"data: {json.dumps(refused.body())}\n\n".encode()
            self.wfile.write(said if self.speaker is None else self.speaker.failed(refused))
            return
        headers = {} if refused.retry is None else {"Retry-After": str(refused.retry)}
        if refused.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if refused.status == 405:
            headers["Allow"] = ALLOW
        path = self.target.partition("?")[0]
        body = routes.error_body(path, refused, self._anthropics)
        self._send_json(body, refused.status, headers)

    @property
    def _anthropics(self) -> bool:
        """Return whether the client is one of Anthropic's, which say so at every path."""
        return self.headers.get("anthropic-version") is not None

    # -- routes

    def _route(self) -> None:
        path, _ = locate(self.target, self.headers)
        replies = path in (*CHAT, *TEXT, *routes.POSTS)
        if self.command == "OPTIONS":
            self._preflight()
        elif self.command == "POST" and path in routes.POSTS:
            self._post(path, bytes(self.line.body))
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

    def _post(self, path: str, body: bytes) -> None:
        """Answer a request of another API than OpenAI's chat."""
        site = self.site
        if path == routes.COUNT:
            asked = anthropic.count(body, site.served)
            more = asked.chat_template_kwargs, asked.continue_final_message
            with self._admitted():
                count = site.engine.count(asked.messages, asked.tools, *more)
            self._send_json({"input_tokens": count})
        else:
            speaker = routes.REPLIES[path](body, site.served)
            self._reply(speaker.asked, speaker)

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
        if self._anthropics:
            self._send_json(anthropic.models(name, wanted))
            return
        one = {"id": name, "object": "model", "created": self.created, "owned_by": "mlxkv"}
        if wanted and wanted != name:
            raise Refused(404, f"[model] no such model; choose {name!r}", "model_not_found")
        self._send_json(one if wanted else {"object": "list", "data": [one]})

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """One of the requests in progress, if it is not one too many. Raises Refused."""
        limit, metrics = self.site.options.max_requests, self.site.metrics
        metrics.add(active=1)
        try:
            if metrics.active > limit:
                others = metrics.active - 1
                raise Refused(429, f"[--max-requests] {others} under way", "busy", retry=1)
            yield
        finally:
            metrics.add(active=-1)

    def _reply(self, request: Request, speaker: Speaker | None = None) -> None:
        """Write the reply to a request. speaker: of another API than OpenAI's."""
        self.speaker = speaker
        with self._admitted():
            caller = self._caller(request)
            if speaker is None:
                self.complete(request, caller, self.site.name)
                return
            speaker.write = self._speak
            Dictation(speaker, self.system_fingerprint, self.created).take(caller)
            if not speaker.streams:
                self._send_json(speaker.document())

    def _caller(self, request: Request) -> Caller:
        whose = tenant(self._key, request.user, request.cache_salt)
        return Caller(
            self.site.engine,
            self.started,
            self.line.gone,
            whose,
            request.continue_final_message,
            request.grammar,
            request.shorten,
        )

    def _speak(self, data: bytes) -> None:
        """Write a part of a speaker's stream."""
        if not self._begun:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Cache-Control", "no-cache")
            self._set_cors_headers()
            self.end_headers()
        self.wfile.write(data)
