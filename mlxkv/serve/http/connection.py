"""HTTP/1.1 with uvicorn and h11, with limits on the size, time and number of chunks of a request.

uvicorn limits connections, the bytes of a head and the time between two requests, and leaves the rest to a reverse
proxy. For servers without one: a client that sends a head or reads a reply too slowly is disconnected, a half-closed
client still gets its reply, and parsing one client's data does not block the others.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlxkv import __version__
from mlxkv.serve.refusals import Refused

HEAD = 32 << 10  # bytes of a request's head, of trailers, or of a chunk's line
BODY = 8 << 20  # bytes of a request's body
CHUNKS = 16 << 10  # per request body: h11 needs 14 us for each
# Bytes that h11 parses before yielding to other connections: of a head, of a chunked body, of any other body. asyncio
# reads 256 KiB at once.
PIECE, CHUNKED_PIECE, BODY_PIECE = 4 << 10, 1 << 10, 32 << 10
RESERVE = 256  # file descriptors for other uses
MAX_CONNECTIONS = 8192  # if the process has no descriptor limit
SECONDS = 30.0  # to receive a request, and to send each part of a reply
IDLE = 75  # seconds that a connection may stay idle between requests
PACE = 16 << 10  # bytes a second by which a larger body extends `SECONDS`
DRAIN = 64 << 20  # bytes discarded after a refusal, so that the client can read the error
BODIES = 16  # largest bodies in flight at once, counted in bytes
DEFAULT_HEADERS = [("server", f"mlxkv/{__version__}"), ("x-content-type-options", "nosniff")]


def connection_limit() -> int:
    """Raise the process's descriptor limit as far as allowed, and return the number of connections it permits."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless, enough = resource.RLIM_INFINITY, MAX_CONNECTIONS + RESERVE
    target = enough if hard == endless else min(hard, enough)
    if limit != endless and limit < target:  # mlx-lm lowers it to 2,048
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = enough if limit == endless else limit
    return max(limit // 2, min(limit - RESERVE, MAX_CONNECTIONS))


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises OSError; socket.gaierror if `host` does not resolve."""
    family, *_, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # "::" accepts IPv4, too
    return socket.create_server(address, family=family, backlog=1024, dualstack_ipv6=both)


class Limits:
    """State shared by a server's connections. For the event loop's thread.

    body: largest request body in bytes. responses: counts by status. bodies: bytes received of each incomplete body,
    keyed by its deadline, the oldest first.
    """

    def __init__(self):
        self.body = BODY
        self.responses: Counter[int] = Counter()
        self.bodies: dict[asyncio.Timeout, int] = {}

    def add_body(self, deadline: asyncio.Timeout, count: int) -> None:
        """Count received bytes of a body. Expire the oldest body's deadline if all bodies together exceed the limit."""
        self.bodies[deadline] += count
        if sum(self.bodies.values()) > BODIES * self.body:
            oldest = next(iter(self.bodies))
            del self.bodies[oldest]
            oldest.reschedule(0)


def late(count: int, client: Any) -> Refused:
    """Log that a request arrived too slowly, and return the client's error."""
    text = f"[request] did not arrive in {SECONDS:g} s; got {count} bytes"
    logging.warning(f"{text} from {client[0] if client else 'a client'}; it is closed")
    return Refused(408, text, "timeout")


class H11Connection(H11Protocol):
    """One connection, with one request at a time."""

    def __init__(self, limits: Limits, **settings: Any):
        super().__init__(**settings)
        self._limits = limits
        self._unread = bytearray()  # not yet parsed by h11
        self._byte_count = self._chunk_count = 0  # of a request
        self._piece = PIECE
        self._is_refused = False  # further data is discarded
        self._is_half_closed = self._is_end_read = False  # the client sent EOF; h11 has seen it
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._next_event, self.conn.next_event = self.conn.next_event, self._take_event

    def _start_timer(self, name: str, seconds: float, call: Callable[[], None]) -> None:
        """Run `call` after `seconds`, unless timer `name` is stopped before or already running."""
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, call)

    def _stop_timer(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()

    # -- asyncio's protocol

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # asyncio sets TCP_NODELAY only on sockets created with IPPROTO_TCP; accepted ones are not, and replies would
        # be 40 ms late.
        self._socket = transport.get_extra_info("socket")
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._stop_timer(name)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._byte_count += len(data)
        if self._is_refused:
            if self._byte_count > DRAIN:
                self.transport.abort()
            return
        self._unread += data
        self._parse()

    def eof_received(self) -> bool:
        """Return whether to keep the connection: the client may have closed only its writing side and still wait for a
        reply."""
        if self._is_refused or self.scope is not None and self.scope["http_version"] == "1.0":
            return False
        self._is_half_closed = True
        self._parse()
        self._probe(1.0)
        return True

    def pause_writing(self) -> None:
        self._start_timer("write", SECONDS, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stop_timer("write")
        super().resume_writing()

    def _probe(self, seconds: float) -> None:
        """Send data that clients ignore until the reply begins: a closed client answers with a reset."""
        if self.transport.is_closing():
            return
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if self.conn.our_state is h11.SEND_RESPONSE:
            event = h11.InformationalResponse(status_code=100, headers=[])
            self.transport.write(self.conn.send(event))
        self._stop_timer("probe")
        self._start_timer("probe", seconds, partial(self._probe, 2 * seconds))

    # -- requests

    def _parse(self) -> None:
        """Parse one piece of the received data, then yield to other connections: 256 KiB may be 43,000 chunks, .6 s."""
        if self.transport.is_closing() or self._is_refused:
            return
        is_awaited = self.conn.our_state is h11.SEND_RESPONSE  # else it is discarded
        if is_awaited and self._byte_count > 2 * (self._limits.body + HEAD):
            self._refuse(Refused(413, "[request] too many bytes for a body", "too_large"))
            return
        # A pipelined request waits for the end of this reply.
        is_waiting = self.conn.their_state is h11.DONE
        if not is_waiting and (self._unread or self._is_half_closed and not self._is_end_read):
            piece = bytes(self._unread[: self._piece])  # b"" signals EOF
            del self._unread[: self._piece]
            self._is_end_read = not piece
            super().data_received(piece)
            is_waiting = self.conn.their_state is h11.DONE
        if self._is_refused or self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and (self._unread or self.conn.trailing_data[0]):
            self._start_timer("head", SECONDS, self._refuse_late)
        else:
            self._stop_timer("head")
        if self._unread or self._is_half_closed and not self._is_end_read:
            self.transport.pause_reading()
            if not is_waiting:
                self.loop.call_soon(self._parse)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _take_event(self) -> Any:
        """Return h11's next event. Raises h11.RemoteProtocolError."""
        event = self._next_event()
        if isinstance(event, h11.Request):
            self._chunk_count = 0
            is_chunked = any(name == b"transfer-encoding" for name, _ in event.headers)
            self._piece = CHUNKED_PIECE if is_chunked else BODY_PIECE
        elif isinstance(event, h11.Data) and event.chunk_end:
            self._chunk_count += 1
            if self._chunk_count > CHUNKS:
                text = f"a body of so many chunks; at most {CHUNKS}"
                raise h11.RemoteProtocolError(text, error_status_hint=413)
        elif isinstance(event, h11.ConnectionClosed):
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()
            return h11.NEED_DATA
        return event

    def on_response_complete(self) -> None:
        if self._is_refused:
            return
        self._byte_count, self._piece = len(self._unread), PIECE
        super().on_response_complete()
        self.loop.call_soon(self._parse)

    def send_400_response(self, msg: str) -> None:
        """Answer an invalid request; uvicorn calls it after h11 has raised."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        is_head = self.cycle is None or self.cycle.response_complete
        if is_head and status == 431 and b"\n" not in self.conn.trailing_data[0]:
            status = 414
        self._refuse(Refused(status, f"[request] {error or msg}"[:200], "invalid_request"))

    def _refuse_late(self) -> None:
        self._refuse(late(self._byte_count, self.client))

    def _refuse(self, refused: Refused) -> None:
        """Answer a request without the application, and close the connection once a client that is still sending can
        have read the reply."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        self._is_refused, self._byte_count = True, 0
        if self.cycle is not None:
            self.cycle.disconnected = True  # stops the application's writes
            self.cycle.message_event.set()
        data = json.dumps(refused.body()).encode()
        headers = [*DEFAULT_HEADERS, ("content-type", "application/json")]
        headers += [("content-length", str(len(data))), ("connection", "close")]
        head = h11.Response(status_code=refused.status, headers=headers)
        for event in (head, h11.Data(data=data), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self._limits.responses[refused.status] += 1
        if self._is_half_closed:  # no more data to drain
            self.transport.close()
            return
        with suppress(OSError):  # the client has closed it
            self.transport.write_eof()
        self.transport.resume_reading()
        self._start_timer("linger", SECONDS, self.transport.abort)


class HTTPServer(uvicorn.Server):
    """uvicorn's server for one application, without its signal handlers. tick: called ten times a second; a true result
    ends `serve`. end: called after the listening sockets are closed, before connections are."""

    def __init__(self, application: Any, limits: Limits, tick: Callable[[], bool], end: Callable):
        super().__init__(
            uvicorn.Config(
                application,
                http=partial(H11Connection, limits),  # pyright: ignore[reportArgumentType] is called, as a type is
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="critical",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                headers=DEFAULT_HEADERS,
                limit_concurrency=connection_limit(),
                timeout_keep_alive=IDLE,
                h11_max_incomplete_event_size=HEAD,
            )
        )
        self._tick, self._end = tick, end

    def capture_signals(self):
        return nullcontext()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._tick()

    async def shutdown(self, sockets: Any = None) -> None:
        for server in self.servers:
            server.close()
        await self._end()
        for conn in list(self.server_state.connections):
            conn.transport.abort()
        if tasks := self.server_state.tasks:
            await asyncio.wait(tasks, timeout=SECONDS)
