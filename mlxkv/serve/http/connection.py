"""HTTP/1.1 by uvicorn and h11, with bounds on what arrives and on who waits.

A connection that waits costs a descriptor, so that nobody keeps others out by opening many, or by sending slowly:
beyond a bound the oldest that waits is closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlxkv import __version__
from mlxkv.serve.apis import anthropic
from mlxkv.serve.refusals import Refused

HEAD = 64 << 10  # bytes of a request's head
BODY = 8 << 20  # bytes of a request's body
CHUNKS = 16 << 10  # of a request's body: h11 takes 14 us for each
PIECE = 8 << 10  # bytes that h11 is given at once; asyncio reads 256 KiB
EVENTS = 64  # of h11, after which other connections have their turn
LINES = 1024  # of a head
EXTRAS = 4 << 10  # bytes of trailers, or of a chunk's line
RESERVE = 256  # descriptors for other things
MAX_CONNECTIONS = 8192  # where no limit is set
SECONDS = 30.0  # for a request to arrive, and for each part of a reply to leave
IDLE = 75.0  # seconds that a connection may wait between requests
PACE = 16 << 10  # bytes a second; a larger request has more time
DRAIN = 64 << 20  # bytes that are read after a refusal, so that the client reads it
GRACE = 1.0  # seconds before a request that is still arriving may be closed for another
BODIES = 16  # the largest bodies that arrive at once, by their bytes
LOOK = 0.5  # seconds between two looks at all connections
STATES = ("ending", "idle", "arriving")  # in the order in which they are closed for others
DEFAULT_HEADERS = [("server", f"mlxkv/{__version__}"), ("x-content-type-options", "nosniff")]


def connection_limit() -> int:
    """Raise this process's limit of descriptors as far as it may, and return how many connections it can have."""
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
    """Return a socket that listens at an address. Raises OSError; socket.gaierror where there is no such host."""
    family, *_, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # "::" is IPv4, too
    return socket.create_server(address, family=family, backlog=1024, dualstack_ipv6=both)


class Limits:
    """What the connections of one server share. For the thread of the event loop.

    body: most bytes of a request. max_connections: of the server. responses: by status. bodies: bytes that came of each
    body that arrives, the oldest first.
    """

    def __init__(self):
        self.body, self.max_connections = BODY, connection_limit()
        self.responses: Counter[int] = Counter()
        self.bodies: dict[H11Connection, int] = {}
        self._log_time = -60.0

    def can_accept(self, connections: set[H11Connection]) -> bool:
        """Return whether to accept a connection, closing the oldest idle one at the limit."""
        if len(connections) < self.max_connections:
            return True
        now = time.monotonic()
        if now > self._log_time + 10:
            self._log_time = now
            logging.warning(
                f"[serve] {len(connections)} connections: the oldest that wait are closed for new ones"
            )
        waiting = [(STATES.index(conn.state), conn.since, id(conn), conn) for conn in connections
                   if conn.state in STATES and (conn.state != "arriving" or now - conn.since >= GRACE)]  # fmt: skip
        if waiting:
            min(waiting)[-1].abort()
        return bool(waiting)

    def add_body(self, conn: H11Connection, count: int) -> None:
        """Note that bytes of a body came. The oldest is refused where all of them together are too much."""
        self.bodies[conn] = self.bodies.get(conn, 0) + count
        if sum(self.bodies.values()) > BODIES * self.body:
            oldest = next(iter(self.bodies))
            del self.bodies[oldest]
            oldest.refuse(Refused(503, "[serve] too much arrives at once", "busy", retry=1))


class H11Connection(H11Protocol):
    """One connection, with one request at a time.

    since: when it came to the state that it has, by `time.monotonic`. arrival_time: of the first byte of the request,
    or None. byte_count: of the request. is_behind: whether there is something to parse, for which others do not wait.
    is_half_closed: whether the client sends no more; it may still read.
    """

    def __init__(self, limits: Limits, **settings: Any):
        super().__init__(**settings)
        self.limits, self._application = limits, self.app
        self.app = self._answer
        self.since, self.is_ending = time.monotonic(), False
        self.arrival_time: float | None = None
        self.byte_count = 0
        self.is_behind = self.is_half_closed = False
        self.conn.next_event, self._next_event = self._take_event, self.conn.next_event
        self._event_count = self._chunk_count = 0
        self._unread = bytearray()  # by h11
        self._end_time = self._probe_time = 0.0  # of a client that sends no more
        self._write_block_time: float | None = None  # since when the client reads nothing

    async def _answer(self, scope: dict, receive: Callable, send: Callable) -> None:
        scope["connection"] = self
        await self._application(scope, receive, send)

    @property
    def is_complete(self) -> bool:
        """Return whether all of the request has come."""
        return not self.cycle.more_body

    @property
    def state(self) -> str:
        if self.is_ending:
            return "ending"
        if self.cycle is None or self.cycle.response_complete:
            return "idle" if self.arrival_time is None else "arriving"
        return "busy" if self.is_complete else "arriving"

    def abort(self) -> None:
        self.connections.discard(self)
        self.transport.abort()

    # -- asyncio's protocol

    def connection_made(self, transport: Any) -> None:
        count, can_accept = len(self.connections), self.limits.can_accept(self.connections)
        super().connection_made(cast(asyncio.Transport, LingeringTransport(transport, self)))
        # asyncio does so where a socket names TCP, as none of a listening one does: replies would wait for 40 ms.
        self._socket = transport.get_extra_info("socket")
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not can_accept:
            self.refuse(Refused(503, f"[serve] {count} connections", "busy", retry=1))

    def data_received(self, data: bytes) -> None:
        self.byte_count += len(data)
        if self.is_ending:
            if self.byte_count > DRAIN:
                self.abort()
            return
        if self.arrival_time is None:
            self.since = self.arrival_time = time.monotonic()
        self._unread += data
        super().data_received(self._next_piece())

    def eof_received(self) -> bool:
        """Return whether the connection stays: the client may have closed its writing side alone, and wait for a
        reply. One that has gone answers the next bytes with a reset, which `look` sees."""
        if self.is_ending or self.scope is not None and self.scope["http_version"] == "1.0":
            return False
        self.is_half_closed = True
        self._end_time = self._probe_time = time.monotonic()
        self.handle_events()
        self._probe(self._end_time)
        return True

    def _probe(self, now: float) -> None:
        """Send what every client ignores, until its reply begins; after twice the time again."""
        if self.state == "busy" and self.conn.our_state is h11.SEND_RESPONSE:
            event = h11.InformationalResponse(status_code=100, headers=[])
            self.transport.write(self.conn.send(event))
        self._probe_time = now + max(1.0, now - self._end_time)

    def pause_writing(self) -> None:
        self._write_block_time = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._write_block_time = None
        super().resume_writing()

    # -- requests

    def handle_events(self) -> None:
        """Parse what has come, in turns with other connections: 256 KiB may be 43,000 chunks, .6 s."""
        self._event_count = 0
        super().handle_events()

    def _take_event(self) -> Any:
        """h11's next event. Raises h11.RemoteProtocolError."""
        while self._event_count < EVENTS:
            self._event_count += 1
            event = self._next_event()
            if event is not h11.NEED_DATA:
                return self._check_event(event)
            self._check_rest()
            if not (self._unread or self.is_half_closed):
                return event
            self.conn.receive_data(self._next_piece())
        self.is_behind = True
        self.transport.pause_reading()
        self.loop.call_soon(self._go_on)
        return h11.NEED_DATA

    def _next_piece(self) -> bytes:
        """Take bytes that h11 has not read; b"" is the end."""
        piece = bytes(self._unread[:PIECE])
        del self._unread[:PIECE]
        return piece

    def _check_rest(self) -> None:
        """Bound what h11 parses at once when its end has come."""
        rest, text = self.conn.trailing_data[0], ""
        if self.conn.their_state is h11.IDLE:
            if rest.count(b"\n") > LINES:
                text = f"a head of more than {LINES} lines"
        elif len(rest) > EXTRAS:
            text = f"trailers, or a chunk's line, of more than {EXTRAS} bytes"
        if text:
            raise h11.RemoteProtocolError(text, error_status_hint=431)

    def _check_event(self, event: Any) -> Any:
        """Count the chunks of a body, and close an idle connection at its end."""
        if isinstance(event, h11.Request):
            self._chunk_count = 0
        elif isinstance(event, h11.Data) and event.chunk_end:
            self._chunk_count += 1
            if self._chunk_count > CHUNKS or self.byte_count > 2 * (self.limits.body + HEAD):
                text = f"a body of so many chunks; at most {CHUNKS}"
                raise h11.RemoteProtocolError(text, error_status_hint=413)
        elif isinstance(event, h11.ConnectionClosed):
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()
            return h11.NEED_DATA
        return event

    def _go_on(self) -> None:
        self.is_behind = False
        if self.transport.is_closing():
            return
        self.handle_events()
        if not self.flow.read_paused:
            self.transport.resume_reading()

    def on_response_complete(self) -> None:
        if self.is_ending:
            return
        self.arrival_time, self.byte_count = None, 0
        self.since = time.monotonic()
        if self.conn.trailing_data[0] or self._unread:  # the next one came with it
            self.arrival_time = self.since
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what h11 does not take for a request; called where it has raised."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        is_head = self.cycle is None or self.cycle.response_complete
        if is_head and status == 431 and b"\n" not in self.conn.trailing_data[0]:
            status = 414
        self.refuse(Refused(status, f"[request] {error or msg}"[:200], "invalid_request"))

    def refuse(self, refused: Refused) -> None:
        """Answer a request that no application answers, and close the connection."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.abort()
            return
        if self.cycle is not None:
            self.cycle.disconnected = True  # its application writes no more
            self.cycle.message_event.set()
        asked = self.scope if self.cycle is not None else {"path": "", "headers": ()}
        names = [name.decode() for name, _ in asked["headers"]]
        data = json.dumps(anthropic.error_of(refused, asked["path"], names)).encode()
        headers = [*DEFAULT_HEADERS, ("content-type", "application/json")]
        headers += [("content-length", str(len(data))), ("connection", "close")]
        headers += [] if refused.retry is None else [("retry-after", str(refused.retry))]
        head = h11.Response(status_code=refused.status, headers=headers)
        for event in (head, h11.Data(data=data), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.limits.responses[refused.status] += 1
        self.transport.close()

    def look(self, now: float) -> None:
        """Close this connection where it waits for too long."""
        state, seconds = self.state, SECONDS + self.byte_count / PACE
        if self._write_block_time is not None and now > self._write_block_time + SECONDS:
            self.abort()
        elif self.is_half_closed:
            if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.abort()  # it has gone
            elif now > self._probe_time:
                self._probe(now)
        elif state == "idle" and now > self.since + IDLE:
            self.transport.close()
        elif state == "ending" and now > self.since + seconds:
            self.abort()
        elif state == "arriving" and now > (self.arrival_time or now) + seconds:
            text = f"[request] did not arrive in {SECONDS:g} s; got {self.byte_count} bytes"
            peer = self.client[0] if self.client else "a client"
            logging.warning(f"{text} from {peer}; it is closed")
            self.refuse(Refused(408, text, "timeout"))


class LingeringTransport:
    """asyncio's transport, which closes in two steps: a client that is still sending reads the reply first."""

    def __init__(self, transport: Any, conn: H11Connection):
        self._transport, self._connection = transport, conn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._connection.is_ending or self._transport.is_closing()

    def resume_reading(self) -> None:
        if not self._connection.is_behind:
            self._transport.resume_reading()

    def close(self) -> None:
        if self.is_closing():
            return
        if self._connection.is_half_closed:  # it sends nothing that would have to be read
            self._transport.close()
            return
        self._connection.is_ending, self._connection.since, self._connection.byte_count = (
            True,
            time.monotonic(),
            0,
        )
        self._transport.resume_reading()
        with suppress(OSError):  # the client has closed it
            self._transport.write_eof()


class HTTPServer(uvicorn.Server):
    """uvicorn's server of one application, without its signals. tick: called ten times a second; its result ends
    `serve`. end: called when nobody comes in any more, before connections are closed."""

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
                timeout_keep_alive=int(IDLE),
                h11_max_incomplete_event_size=HEAD,
            )
        )
        self.limits, self._tick, self._end, self._look_time = limits, tick, end, 0.0

    def capture_signals(self):
        return nullcontext()

    def _connections(self) -> list[H11Connection]:
        return [c for c in self.server_state.connections if isinstance(c, H11Connection)]

    async def on_tick(self, counter: int) -> bool:
        if (now := time.monotonic()) > self._look_time + LOOK:
            self._look_time = now
            for conn in self._connections():
                conn.look(now)
        return await super().on_tick(counter) or self._tick()

    async def shutdown(self, sockets: Any = None) -> None:
        for server in self.servers:
            server.close()
        await self._end()
        for conn in self._connections():
            conn.abort()
        if tasks := self.server_state.tasks:
            await asyncio.wait(tasks, timeout=SECONDS)
