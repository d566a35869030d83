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
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlxkv import __version__
from mlxkv.serve.refusals import Refused

HEAD = 64 << 10  # bytes of a request's head
RESERVE, MAX_CONNECTIONS = (
    256,
    8192,
)  # descriptors for other things; connections where no limit is set
SECONDS = 30.0  # for a request to arrive, and for each part of a reply to leave
IDLE = 75.0  # seconds that a connection may wait between requests
PACE = 16 << 10  # bytes a second; a larger request has more time
DRAIN = 64 << 20  # bytes that are read after a refusal, so that the client reads it
GRACE = 1.0  # seconds before a request that is still arriving may be closed for another
BODIES = 16  # the largest bodies that arrive at once, by their bytes
LOOK = 0.5  # seconds between two looks at all connections
# What a connection does, in the order in which they are closed for others. Those in `busy` are not.
STATES = ("ending", "idle", "arriving", "busy")
DEFAULT_HEADERS = [("server", f"mlxkv/{__version__}"), ("x-content-type-options", "nosniff")]


def connection_limit() -> int:
    """Raise this process's limit of descriptors as far as it may, and return how many connections it can have."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = (
        MAX_CONNECTIONS + RESERVE
        if hard == resource.RLIM_INFINITY
        else min(hard, MAX_CONNECTIONS + RESERVE)
    )
    if limit != resource.RLIM_INFINITY and limit < wanted:  # mlx-lm lowers it to 2,048
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        MAX_CONNECTIONS
        if limit == resource.RLIM_INFINITY
        else max(limit // 2, min(limit - RESERVE, MAX_CONNECTIONS))
    )


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address. Raises OSError; socket.gaierror where there is no such host."""
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    # asyncio sets TCP_NODELAY where the protocol is named.
    out = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        out.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and socket.has_dualstack_ipv6():
            out.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # "::" is IPv4, too
        out.bind(address)
        out.listen(1024)
    except BaseException:
        out.close()
        raise
    return out


class Limits:
    """What the connections of one server share. For the thread of the event loop.

    body: bytes of a request. max_connections: of the server. count_status: is told the status of replies that no
    application wrote.
    wires: connections by state, the oldest first, with the time since when. pending_bytes: of requests that arrive.
    """

    def __init__(self, body: int, count_status: Callable[[int], None] = lambda status: None):
        self.body, self.max_connections, self.count_status = body, connection_limit(), count_status
        self.wires: dict[str, dict[Wire, float]] = {state: {} for state in STATES}
        self.pending_bytes = 0
        self._log_time = -60.0

    def move(self, wire: Wire, state: str | None) -> None:
        """Note what a connection does now; None: it is closed."""
        before = wire.state
        if before == state:
            return
        self.pending_bytes += wire.byte_count * ((state == "arriving") - (before == "arriving"))
        if before is not None:
            del self.wires[before][wire]
        if state is not None:
            self.wires[state][wire] = time.monotonic()
        wire.state = state

    def make_room(self) -> bool:
        """Close the oldest connection that waits. Returns False if there is none."""
        now, count = time.monotonic(), sum(map(len, self.wires.values()))
        if now > self._log_time + 10:
            self._log_time = now
            logging.warning(
                f"[serve] {count} connections: the oldest that wait are closed for new ones"
            )
        for state in ("ending", "idle", "arriving"):
            wire, since = next(iter(self.wires[state].items()), (None, now))
            if wire is not None and (state != "arriving" or now - since >= GRACE):
                wire.abort()
                return True
        return False

    def bound_bodies(self) -> None:
        """Refuse the oldest request that arrives where all of them together are too much."""
        if self.pending_bytes > BODIES * self.body:
            oldest = next(iter(self.wires["arriving"]))
            oldest.refuse(Refused(503, "[serve] too much arrives at once", "busy", retry=1))

    def look(self) -> None:
        """Close what waits for too long."""
        now = time.monotonic()
        for state, wires in self.wires.items():
            for wire, since in list(wires.items()):
                wire.look(now, now - since, state)


class Wire(H11Protocol):
    """One connection, with one request at a time.

    state: one of STATES. arrival_time: of the first byte of the request, by `time.monotonic`, or None. byte_count: of
    the request. refusal: why whoever reads its body has to stop, or None.
    """

    def __init__(self, limits: Limits, **settings: Any):
        super().__init__(**settings)
        self.limits, self._application = limits, self.app
        self.app = self._answer
        self.state: str | None = None
        self.arrival_time: float | None = None
        self.byte_count, self.refusal = 0, None
        self._write_block_time: float | None = None  # since when the client reads nothing
        self._half_closed = False

    async def _answer(self, scope: dict, receive: Callable, send: Callable) -> None:
        scope["wire"] = self
        await self._application(scope, receive, send)

    @property
    def is_complete(self) -> bool:
        """Return whether all of the request has come."""
        return not self.cycle.more_body

    def abort(self) -> None:
        self.transport.abort()
        self.limits.move(self, None)

    # -- asyncio's protocol

    def connection_made(self, transport: Any) -> None:
        super().connection_made(Lingering(transport, self))
        count = sum(map(len, self.limits.wires.values()))
        fits = count < self.limits.max_connections or self.limits.make_room()
        self.limits.move(self, "idle")
        if not fits:
            self.refuse(Refused(503, f"[serve] {count} connections", "busy", retry=1))

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.move(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.byte_count += len(data)
        if self.state == "ending":
            if self.byte_count > DRAIN:
                self.abort()
            return
        self.arrival_time = self.arrival_time or time.monotonic()
        if self.state == "arriving":
            self.limits.pending_bytes += len(data)
        super().data_received(data)
        self._place()
        self.limits.bound_bodies()

    def eof_received(self) -> bool:
        """Return whether the connection stays open: the client has left, or has no more to say.

        What is written to a closed connection comes back as an error: before a reply, HTTP/1.1 has a line for that.
        """
        if self.state != "busy":
            return False
        self._half_closed, self.cycle.keep_alive = True, False
        if self.conn.our_state is h11.SEND_RESPONSE and self.scope["http_version"] == "1.1":
            goes_on = h11.InformationalResponse(status_code=100, headers=[])
            self.transport.write(self.conn.send(goes_on))
        return True

    def pause_writing(self) -> None:
        self._write_block_time = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._write_block_time = None
        super().resume_writing()

    # -- requests

    def on_response_complete(self) -> None:
        if self.state in ("ending", None):
            return
        self.limits.move(self, "idle")
        self.arrival_time, self.byte_count, self.refusal = None, 0, None
        super().on_response_complete()
        if self.cycle.response_complete and not self.conn.trailing_data[0]:
            return
        self.arrival_time = time.monotonic()  # the next one came with it
        self._place()

    def _place(self) -> None:
        if self.state in ("ending", None):
            return
        if self.cycle is None or self.cycle.response_complete:
            self.limits.move(self, "arriving" if self.arrival_time else "idle")
        elif self.refusal is None:
            self.limits.move(self, "busy" if self.is_complete else "arriving")

    def send_400_response(self, msg: str) -> None:
        """Answer what h11 does not take for a request; called where it has raised."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        if status == 431 and b"\n" not in self.conn.trailing_data[0]:
            status = 414
        self._write_refusal(Refused(status, f"[request] {error or msg}"[:200], "invalid_request"))

    def refuse(self, refused: Refused) -> None:
        """Answer a request that has not arrived: by its application, if that reads its body."""
        if self.cycle is None or self.cycle.response_complete:
            self._write_refusal(refused)
        else:
            self.refusal = refused
            self.limits.move(self, "busy")
            self.cycle.message_event.set()

    def _write_refusal(self, refused: Refused) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.abort()
            return
        if self.cycle is not None:
            self.cycle.disconnected = True  # its application writes no more
            self.cycle.message_event.set()
        data = json.dumps(refused.body()).encode()
        headers = [*DEFAULT_HEADERS, ("content-type", "application/json")]
        headers += [("content-length", str(len(data))), ("connection", "close")]
        headers += [] if refused.retry is None else [("retry-after", str(refused.retry))]
        head = h11.Response(status_code=refused.status, headers=headers)
        for event in (head, h11.Data(data=data), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.limits.count_status(refused.status)
        self.transport.close()

    def look(self, now: float, since: float, state: str) -> None:
        """Close this connection where it waits for too long. since: seconds in its state."""
        if self._write_block_time is not None and now > self._write_block_time + SECONDS:
            self.abort()
        elif state == "idle" and since > IDLE:
            self.transport.close()
        elif state == "busy" and self._half_closed:
            if self.transport.get_extra_info("socket").getsockopt(
                socket.SOL_SOCKET, socket.SO_ERROR
            ):
                self.abort()
        elif state == "ending" and since > SECONDS + self.byte_count / PACE:
            self.abort()
        elif state == "arriving" and now > self.arrival_time + SECONDS + self.byte_count / PACE:
            text = f"[request] did not arrive in {SECONDS:g} s; got {self.byte_count} bytes"
            peer = self.client[0] if self.client else "a client"
            logging.warning(f"{text} from {peer}; it is closed")
            self.refuse(Refused(408, text, "timeout"))


class Lingering:
    """asyncio's transport, which closes in two steps: a client that is still sending reads the reply first."""

    def __init__(self, transport: Any, wire: Wire):
        self._transport, self._wire = transport, wire

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._wire.state in ("ending", None) or self._transport.is_closing()

    def close(self) -> None:
        wire = self._wire
        if self._transport.is_closing() or wire.state == "ending":
            return
        wire.limits.move(wire, "ending")
        wire.byte_count = 0
        if wire._half_closed:
            self._transport.close()
            return
        self._transport.resume_reading()
        with suppress(OSError):  # the client has closed it
            self._transport.write_eof()


class Web(uvicorn.Server):
    """uvicorn's server of one application, without its signals. tick: called ten times a second; its result ends
    `serve`. end: called when nobody comes in any more, before connections are closed."""

    def __init__(self, application: Any, limits: Limits, tick: Callable[[], bool], end: Callable):
        super().__init__(
            uvicorn.Config(
                application,
                http=partial(Wire, limits),
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

    async def on_tick(self, counter: int) -> bool:
        if (now := time.monotonic()) > self._look_time + LOOK:
            self._look_time = now
            self.limits.look()
        return await super().on_tick(counter) or self._tick()

    async def shutdown(self, sockets: Any = None) -> None:
        for server in self.servers:
            server.close()
        await self._end()
        for wires in self.limits.wires.values():
            for wire in list(wires):
                wire.abort()
        if tasks := self.server_state.tasks:
            await asyncio.wait(tasks, timeout=SECONDS)
