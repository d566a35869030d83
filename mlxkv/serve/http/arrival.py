"""One connection: its bytes become requests, and replies become bytes, both by h11's strict grammar."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import h11

from mlxkv.serve.refusals import Refused

HEAD, TARGET, FIELDS = (
    64 << 10,
    8 << 10,
    100,
)  # bytes of a request's head, of its target; header fields
PART = 1 << 16  # bytes that are read at once


class Line:
    """A connection with one request at a time.

    peer: the client's address. head: of the request, once it has arrived. body: its bytes so far.
    refused: why it will get no reply, or None. began: when its first byte came, by `time.monotonic`.
    received: bytes of it. last: no further request is read from this connection.

    One thread has a line: that of all connections while a request arrives, then the request's own.
    """

    def __init__(self, sock: socket.socket, peer: str):
        self.sock, self.peer = sock, peer
        self.wire = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD)
        self._poll = select.poll()  # select.select knows no descriptor above 1023
        self._poll.register(sock, select.POLLIN)
        self.last = False
        self._clear()

    def _clear(self) -> None:
        self.head: h11.Request | None = None
        self.body = bytearray()
        self.refused: Refused | None = None
        self.began, self.received = 0.0, 0
        self._out, self._bare, self._asked = b"", False, False

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()

    # -- a request

    def take(self, data: bytes | None, limit: int, admit: Callable[[Line], None]) -> bool:
        """Read on. data: what came, b"" at the client's end, None for what was read before. limit: bytes
        of a body. admit: looks at each head before its body is read, and may raise Refused.

        Returns whether there is a whole request, or a refusal. Raises EOFError where the client has left.
        """
        if data is not None:
            self.wire.receive_data(data)
            self.received += len(data)
            self.began = self.began or time.monotonic()
        try:
            while True:
                event = self.wire.next_event()
                if event is h11.NEED_DATA:
                    return False
                if event is h11.PAUSED or isinstance(event, h11.EndOfMessage):
                    return True
                if isinstance(event, h11.ConnectionClosed):
                    raise EOFError
                if isinstance(event, h11.Request):
                    self._begin(event, limit, admit)
                elif len(self.body) + len(event.data) > limit:
                    raise _too_large(len(self.body) + len(event.data), limit)
                else:
                    self.body += event.data
        except h11.RemoteProtocolError as error:
            if data == b"":
                raise EOFError from None
            status = error.error_status_hint
            if status == 431 and b"\n" not in self.wire.trailing_data[0]:
                status = 414
            self.refused = Refused(status, f"[request] {error}"[:200], "invalid_request")
        except Refused as refused:
            self.refused = refused
        self.last = True  # where the next request begins is not known
        return True

    def _begin(self, head: h11.Request, limit: int, admit: Callable[[Line], None]) -> None:
        self.head = head
        names = [name for name, _ in head.headers]
        coded = b"transfer-encoding" in names
        lengths = [int(value) for name, value in head.headers if name == b"content-length"]
        if not head.http_version.startswith(b"1."):
            version = head.http_version.decode()
            raise Refused(505, f"[request] HTTP {version} is not spoken here; choose 1.1")
        if len(head.target) > TARGET:
            raise Refused(414, f"[request] a target of {len(head.target)} bytes; at most {TARGET}")
        if len(names) > FIELDS:
            raise Refused(431, f"[request] {len(names)} header fields; at most {FIELDS}")
        if coded and (lengths or head.http_version == b"1.0"):
            raise Refused(400, "[Transfer-Encoding] with a Content-Length, or in HTTP/1.0")
        if head.method == b"POST" and not (coded or lengths):
            raise Refused(411, "[Content-Length] missing")
        if lengths and lengths[0] > limit:
            raise _too_large(lengths[0], limit)
        admit(self)
        if self.wire.they_are_waiting_for_100_continue:
            self._go_on()

    def _go_on(self) -> None:
        with suppress(BlockingIOError):
            self.sock.send(self.wire.send(h11.InformationalResponse(status_code=100, headers=[])))

    # -- its reply; mlx-lm's handler writes to this as to a file

    @property
    def speaks_1_1(self) -> bool:
        return self.head is not None and self.head.http_version > b"1.0"

    def start(self, status: int, headers: list[tuple[str, str]]) -> None:
        """Begin the reply. Its head leaves with the first bytes of its body."""
        self._bare = status == 204 or (self.head is not None and self.head.method == b"HEAD")
        if self.last:
            headers = [*headers, ("Connection", "close")]
        self._out += self.wire.send(h11.Response(status_code=status, headers=headers))

    def write(self, data: bytes) -> None:
        if not self._bare:
            self._out += self.wire.send(h11.Data(data=data))
        self.flush()

    def flush(self) -> None:
        if self._out:
            out, self._out = self._out, b""
            self.sock.sendall(out)

    def finish(self) -> None:
        self._out += self.wire.send(h11.EndOfMessage())
        self.flush()

    def next(self) -> bool:
        """Prepare for the next request. Returns False if this connection takes none."""
        if self.last or self.wire.states != {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}:
            return False
        self.wire.start_next_cycle()
        self._clear()
        if self.wire.trailing_data[0]:
            self.began, self.received = time.monotonic(), len(self.wire.trailing_data[0])
        return True

    def gone(self) -> bool:
        """Return whether the client has hung up.

        The end of what it sends may mean that, or only that it has no more to say. What is written to a
        closed connection comes back as an error: before a reply, HTTP/1.1 has a line for that.
        """
        try:
            if not self._poll.poll(0) or self.sock.recv(1, socket.MSG_PEEK):
                return False
            if self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return True
            if not self._asked and self.wire.our_state is h11.SEND_RESPONSE and self.speaks_1_1:
                self._asked = True
                self._go_on()
            return False
        except OSError:
            return True


def _too_large(count: int, limit: int) -> Refused:
    return Refused(413, f"[body] {count} bytes are too many; at most {limit}", "too_large")
