"""How requests arrive: in their time, and over so many connections at once."""

from __future__ import annotations

import io
import logging
import socket
import time
from contextlib import suppress
from threading import BoundedSemaphore, Lock

from mlxkv.serve.refusals import Refused

PACE = 16 << 10  # bytes; each so many give a request another second
DRAIN = 64 << 20  # bytes of a refused body that are read, so that the client hears why
GRACE = 1.0  # seconds in which no request has to make room
LEAVE = 1.0  # seconds in which one that has to is gone


class Arriving(io.RawIOBase):
    """What a client sends. All of it has `seconds`, and one more for each `PACE` bytes that came: who
    sends byte by byte gains no time, a large body over a slow line does.

    Raises Refused when that is over, TimeoutError if nothing came at all.
    """

    def __init__(self, line: socket.socket, seconds: float):
        self._line, self._seconds = line, seconds
        self._start, self._received = time.monotonic(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        left = self._start + self._seconds + self._received / PACE - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            self._line.settimeout(left)
            count = self._line.recv_into(buffer)
        except TimeoutError:
            if not self._received:
                raise  # a line that was opened for later, as browsers do
            text = f"[request] did not arrive in {self._seconds:g} s; got {self._received} bytes"
            logging.warning(f"{text} from {_name(self._line)}; it is closed")
            raise Refused(408, text, "timeout") from None
        finally:
            self._line.settimeout(self._seconds)  # for what is written
        self._received += count
        return count


def read_body(file: io.BufferedIOBase, length: str | None, limit: int) -> bytes:
    """A request's body. length: its Content-Length. Raises Refused."""
    if length is None:
        raise Refused(411, "[Content-Length] missing")
    if not (length.isascii() and length.isdigit() and len(length) < 19):
        raise Refused(400, "[Content-Length] not a number")
    count = int(length)
    if count > limit:
        left = min(count, DRAIN)
        while left > 0 and (part := file.read(min(left, 1 << 16))):
            left -= len(part)
        raise Refused(413, f"[body] {count} bytes are too many; at most {limit}", "too_large")
    raw = file.read(count)
    if len(raw) < count:
        raise ConnectionAbortedError("the body ended early")
    return raw


class Door:
    """Lets so many connections in. Where all places are taken, the request that has been arriving
    longest makes room for a new one; those that have arrived stay."""

    def __init__(self, places: int):
        self._places, self._room = places, BoundedSemaphore(places)
        self._lock, self._full = Lock(), False
        self._arriving: dict[socket.socket, float] = {}  # since when, the oldest first

    def enter(self, line: socket.socket) -> bool:
        """Whether there is a place for it. Called by one thread."""
        entered = self._room.acquire(blocking=False)
        if not entered and not self._full:
            logging.warning(
                f"[--max-requests] all {self._places} connections are taken; new ones are closed, or "
                "take the place of requests that are slow to arrive"
            )
        self._full = not entered
        if not entered and not (self._close_oldest() and self._room.acquire(timeout=LEAVE)):
            return False
        with self._lock:
            self._arriving[line] = time.monotonic()
        return True

    def arrived(self, line: socket.socket) -> None:
        """Its request is all there."""
        with self._lock:
            self._arriving.pop(line, None)

    def leave(self, line: socket.socket) -> None:
        self.arrived(line)
        self._room.release()

    def _close_oldest(self) -> bool:
        with self._lock:
            oldest, since = next(iter(self._arriving.items()), (None, 0.0))
            if oldest is None or time.monotonic() - since < GRACE:
                return False
            del self._arriving[oldest]
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and goes
        return True


def _name(line: socket.socket) -> str:
    try:
        return line.getpeername()[0]
    except OSError:
        return "a line that is gone"
