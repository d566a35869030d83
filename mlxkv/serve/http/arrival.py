"""Limits on the arrival of requests: their time, their size, and how many connections wait at once."""

from __future__ import annotations

import io
import logging
import socket
import time
from contextlib import suppress
from threading import BoundedSemaphore, Lock

from mlxkv.serve.refusals import Refused

PACE = 16 << 10  # bytes a second; a larger request has more time
DRAIN = 64 << 20  # bytes of a refused body that are read: then the client reads the refusal
GRACE = 1.0  # seconds before a request that is still arriving may be closed
LEAVE = 1.0  # seconds for the thread of a closed request to end


class Arriving(io.RawIOBase):
    """Reads from a client for `seconds`, and one more for each `PACE` bytes that came: a large body on a
    slow line has more time, a client that sends byte by byte has not.

    Raises Refused when the time is over, TimeoutError if nothing came at all.
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
                raise  # browsers open connections for later
            text = f"[request] did not arrive in {self._seconds:g} s; got {self._received} bytes"
            logging.warning(f"{text} from {_name(self._line)}; it is closed")
            raise Refused(408, text, "timeout") from None
        finally:
            self._line.settimeout(self._seconds)  # for writing
        self._received += count
        return count


def read_body(file: io.BufferedIOBase, length: str | None, limit: int) -> bytes:
    """Read a request's body. length: its Content-Length. limit: in bytes. Raises Refused."""
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
    """Admits connections up to a number of places. When all are taken, a new one gets the place of the
    request that has been arriving longest; a request that has arrived keeps its place."""

    def __init__(self, places: int):
        self._places, self._room = places, BoundedSemaphore(places)
        self._lock, self._full = Lock(), False
        self._arriving: dict[socket.socket, float] = {}  # start times, oldest first

    def enter(self, line: socket.socket) -> bool:
        """Take a place; False if there is none. For one thread alone."""
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
        """Note that the whole request has arrived."""
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
                oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and leaves
        return True


def _name(line: socket.socket) -> str:
    try:
        return line.getpeername()[0]
    except OSError:
        return "a closed connection"
