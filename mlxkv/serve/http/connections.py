"""All connections: one thread waits for requests to arrive, each request has a thread of its own.

A connection that waits costs a descriptor and no thread, so that nobody keeps others out by opening many,
or by sending slowly: beyond a bound, and when no descriptor is left, the oldest that waits is closed.
"""

from __future__ import annotations

import logging
import resource
import socket
import time
from collections import deque
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector
from threading import Event, Thread

from mlxkv.serve.http.arrival import PART, Line
from mlxkv.serve.refusals import Refused

RESERVE, MOST = (
    256,
    8192,
)  # descriptors for files and other things; connections where no limit is set
IDLE = 75.0  # seconds that a connection may wait between requests
PACE = 16 << 10  # bytes a second; a larger request has more time
DRAIN = 64 << 20  # bytes that are read after a refusal, so that the client reads it
GRACE = 1.0  # seconds before a request that is still arriving may be closed for another
BODIES = 16  # the largest bodies that arrive at once, by their bytes
FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
# What a connection does, in the order in which they are closed for others. Those in `busy` are not.
STATES = ("ending", "idle", "arriving", "busy")


def most() -> int:
    """Connections that this process can have."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if limit == resource.RLIM_INFINITY else max(limit // 2, min(limit - RESERVE, MOST))


def _listen(family: int, address: tuple) -> socket.socket:
    """A socket that listens. Raises OSError."""
    out = socket.socket(family)
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


class Connections:
    """Accepts connections and reads requests. A subclass answers them.

    seconds: for a request to arrive, and for each part of a reply to leave. body: bytes of a request.
    busy: requests that are answered at once; others get 503. most: connections.
    """

    def __init__(self, family: int, address: tuple, seconds: float, body: int, busy: int):
        self.seconds, self.body_bytes, self.busy = seconds, body, busy
        self.most = most()
        self.lines: dict[str, dict[Line, float]] = {state: {} for state in STATES}  # since when
        self._arriving = 0  # bytes of requests that are arriving
        self._back: deque[Line] = deque()  # their replies have been written
        self._told = 0.0
        self._stopping, self._closed, self._ended = False, False, Event()
        self._ended.set()
        self.socket = _listen(family, address)
        self._selector = DefaultSelector()
        self._waker, self._wakes = socket.socketpair()
        self.server_address = self.socket.getsockname()
        for one in (self._waker, self._wakes, self.socket):
            one.setblocking(False)
        self._selector.register(self._wakes, EVENT_READ)
        self._selector.register(self.socket, EVENT_READ)

    # -- for subclasses

    def admit(self, line: Line) -> None:
        """Look at the head of a request before its body is read. Raises Refused."""

    def answer(self, line: Line) -> None:
        """Write the reply to a request. Raises ConnectionError or TimeoutError if the client has left."""
        raise NotImplementedError

    def failed(self, error: Exception) -> None:
        """Note that a reply could not be written."""

    def service_actions(self) -> None:
        """Called twice a second."""

    # -- the thread of all connections

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        """Serve until `stop`. Raises what `service_actions` raises."""
        self._ended.clear()
        looked = time.monotonic()
        try:
            while not self._stopping:
                for key, _ in self._selector.select(poll_interval):
                    if key.fileobj is self.socket:
                        self._accept()
                    elif key.fileobj is self._wakes:
                        with suppress(BlockingIOError):
                            self._wakes.recv(PART)
                    elif key.fileobj in self.lines["arriving"] or key.fileobj in self.lines["idle"]:
                        self._read(key.fileobj)
                    elif key.fileobj in self.lines["ending"]:
                        self._drain(key.fileobj)
                while self._back:
                    self._after(self._back.popleft())
                if (now := time.monotonic()) >= looked + poll_interval:
                    looked = now
                    self._sweep(now)
                    self.service_actions()
        finally:
            self._stopping = False
            self._ended.set()

    def stop(self) -> None:
        """End `serve_forever`. For any thread, and for signal handlers."""
        self._stopping = True
        self._wake()

    def shutdown(self) -> None:
        """End `serve_forever`, and wait for that."""
        self.stop()
        self._ended.wait()

    def server_close(self) -> None:
        """Close everything. Threads that write replies find that their client has left, and close."""
        self._closed = True
        for one in (self.socket, self._waker, self._wakes):
            one.close()
        for state in STATES:
            for line in list(self.lines[state]):
                with suppress(OSError):
                    line.sock.shutdown(socket.SHUT_RDWR)
                if state != "busy":
                    line.close()
        while self._back:
            self._back.popleft().close()
        self._selector.close()

    def _wake(self) -> None:
        with suppress(OSError):  # full: awake; closed: ended
            self._waker.send(b"\0")

    def _put(self, line: Line, state: str | None) -> None:
        """Move a connection to another state; None closes it."""
        before = next((one for one in STATES if line in self.lines[one]), None)
        if before is not None:
            del self.lines[before][line]
        watched, watch = before not in (None, "busy"), state not in (None, "busy")
        self._arriving += line.received * ((state == "arriving") - (before == "arriving"))
        if watched and not watch:
            self._selector.unregister(line)
        if state is None:
            line.close()
            return
        self.lines[state][line] = time.monotonic()
        if watch and not watched:
            line.sock.setblocking(False)
            self._selector.register(line, EVENT_READ)

    def _accept(self) -> None:
        for _ in range(64):
            try:
                sock, address = self.socket.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError as error:  # no descriptor is left
                if not self._make_room(str(error)):
                    self._selector.unregister(self.socket)  # until the next look
                    return
                continue
            count = sum(map(len, self.lines.values()))
            sock.setblocking(False)
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if count >= self.most and not self._make_room(f"{count} connections"):
                with suppress(OSError):
                    sock.send(FULL)
                sock.close()
            else:
                self._put(Line(sock, address[0]), "idle")

    def _make_room(self, why: str) -> bool:
        """Close the oldest connection that waits. Returns False if there is none."""
        now = time.monotonic()
        if now > self._told + 10:
            self._told = now
            logging.warning(f"[serve] {why}: the oldest that wait are closed for new ones")
        for state in ("ending", "idle", "arriving"):
            line, since = next(iter(self.lines[state].items()), (None, now))
            if line is not None and (state != "arriving" or now - since >= GRACE):
                self._put(line, None)
                return True
        return False

    def _receive(self, line: Line) -> bytes | None:
        """Return what came, b"" at the end, None for nothing."""
        try:
            return line.sock.recv(PART)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _read(self, line: Line, again: bool = False) -> None:
        """Read on. again: look at what was read before."""
        data = None if again else self._receive(line)
        if data is None and not again:
            return
        if data and line in self.lines["idle"]:
            self._put(line, "arriving")
        self._arriving += len(data or b"")
        try:
            whole = line.take(data, self.body_bytes, self.admit)
        except EOFError:
            self._put(line, None)
            return
        except Exception as error:  # of h11, or ours: this connection is lost, others are not
            logging.exception("a request could not be read")
            self.failed(error)
            self._put(line, None)
            return
        if whole:
            self._answer(line)
        elif self._arriving > BODIES * self.body_bytes:
            oldest = next(iter(self.lines["arriving"]))
            self._refuse(oldest, Refused(503, "[serve] too much arrives at once", "busy", retry=1))

    def _refuse(self, line: Line, refused: Refused) -> None:
        line.refused, line.last = refused, True
        self._answer(line)

    def _answer(self, line: Line) -> None:
        if line.refused is None and len(self.lines["busy"]) >= self.busy:
            line.last = True
            line.refused = Refused(
                503, f"[--max-requests] {self.busy} replies are under way", "busy", retry=1
            )
        self._put(line, "busy")
        if line.refused is not None:  # a few bytes, which do not wait
            line.sock.settimeout(0)
            self._run(line)
        else:
            line.sock.settimeout(self.seconds)
            Thread(target=self._run, args=(line,), daemon=True).start()

    def _run(self, line: Line) -> None:
        """Write a reply: in a thread of its own, or a refusal."""
        try:
            self.answer(line)
        except Exception as error:
            self.failed(error)
            line.sock.close()
        finally:
            self._back.append(line)
            self._wake()
            if self._closed:
                line.close()

    def _after(self, line: Line) -> None:
        """Go on with a connection whose reply has been written."""
        if line.fileno() < 0:
            self._put(line, None)
        elif line.next():
            self._put(line, "arriving" if line.began else "idle")
            self._read(line, again=True)
        else:
            with suppress(OSError):
                line.sock.shutdown(socket.SHUT_WR)
            line.began, line.received = time.monotonic(), 0
            self._put(line, "ending")

    def _drain(self, line: Line) -> None:
        data = self._receive(line)
        if data is not None:
            line.received += len(data)
            if not data or line.received > DRAIN:
                self._put(line, None)

    def _sweep(self, now: float) -> None:
        """Close what waits for too long."""
        with suppress(KeyError, ValueError):  # it is registered, or closed
            self._selector.register(self.socket, EVENT_READ)
        for line, since in list(self.lines["idle"].items()):
            if now > since + IDLE:
                self._put(line, None)
        for state in ("arriving", "ending"):
            for line in list(self.lines[state]):
                if now <= line.began + self.seconds + line.received / PACE:
                    continue
                if state == "ending":
                    self._put(line, None)
                    continue
                text = f"[request] did not arrive in {self.seconds:g} s; got {line.received} bytes"
                logging.warning(f"{text} from {line.peer}; it is closed")
                self._refuse(line, Refused(408, text, "timeout"))
