"""Start and end of `mlxkv serve`: loads the model, listens, and puts sessions away at the end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident

import mlx.core as mx

from mlxkv.console import ENDING, PlainLog, human_bytes, note, on
from mlxkv.errors import MachineError, UserError
from mlxkv.metal.launch import backend
from mlxkv.models.loading import quality
from mlxkv.serve import ranks
from mlxkv.serve.engine import Engine
from mlxkv.serve.http.arrival import Line
from mlxkv.serve.http.connections import Connections
from mlxkv.serve.http.handler import Handler
from mlxkv.serve.http.site import Site
from mlxkv.serve.metrics import Metrics
from mlxkv.serve.options import ServeOptions

GRACE = 5.0  # seconds for replies under way when the end is asked for; Docker kills after 10
TOLD = 2.0  # seconds for their clients to read that they were cut off


class Server(Connections):
    """Serves each request in a thread, at most `4 * max_requests` of them. Raises what loading raises,
    and OSError where it cannot listen.

    under_way: threads that write replies.
    """

    def __init__(self, options: ServeOptions):
        self.metrics = Metrics()
        self.under_way: set[int] = set()
        self.engine = Engine(options, self.metrics)
        try:
            self.site = Site(options, self.engine, self.metrics)
            family, address = _address(options)
            busy = 4 * options.max_requests
            super().__init__(family, address, Handler.timeout, options.body_bytes, busy)
        except KeyboardInterrupt:  # nothing is there to lose, and loading stops for nobody
            os._exit(128 + signal.SIGINT)
        except BaseException:
            self.engine.stop_and_join()
            raise

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def admit(self, line: Line) -> None:
        Handler(self.site, line).admit()

    def answer(self, line: Line) -> None:
        thread = get_ident()
        self.under_way.add(thread)
        try:
            Handler(self.site, line).answer()
        finally:
            self.under_way.discard(thread)

    def failed(self, error: Exception) -> None:
        if isinstance(error, OSError):
            self.metrics.add(cut_off=1)
        else:
            logging.error("a connection failed", exc_info=error)

    def service_actions(self):
        self.engine.check()  # called twice a second

    def close(self, hurry: Callable[[], bool] = lambda: True) -> None:
        """End the engine; sessions go to disk, if there is one. Replies under way have `GRACE` seconds, unless
        hurry() becomes true; then their clients are told."""
        self.socket.close()  # nobody comes in
        self._settle(GRACE, hurry)
        self.engine.stop_and_join()
        self._settle(TOLD, lambda: False)
        self.server_close()

    def _settle(self, seconds: float, hurry: Callable[[], bool]) -> None:
        """Wait for replies under way."""
        end = time.monotonic() + seconds
        while self.under_way and time.monotonic() < end and not hurry():
            time.sleep(0.02)


def _address(options: ServeOptions) -> tuple[socket.AddressFamily, tuple]:
    try:
        found = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise UserError(f"[--host] no such address; got {options.host!r} ({error})") from None
    return found[0][0], found[0][4]


def run(options: ServeOptions) -> None:
    """Serve until Ctrl-C, SIGTERM or SIGHUP. A second one cuts replies short; sessions are put away then, too."""
    log = logging.StreamHandler()
    log.setFormatter(PlainLog())
    logging.basicConfig(level=logging.WARNING, handlers=[log])
    group = mx.distributed.init()
    if group.rank():
        _follow(options)
        return
    try:
        server = Server(options)
    except OSError as error:
        raise MachineError(
            f"[--port] cannot listen on {options.host}:{options.port}: {error.strerror}"
        ) from None
    loaded, memory = server.site.loaded, server.engine.memory
    loaded.tell(backend())
    if group.size() == 1:
        quality.warn(loaded)
    each = memory.need(1 << 14) / memory.fp16(1 << 14) if memory.fp16(1 << 14) else 1
    where = f" in each of {size} processes" if (size := group.size()) > 1 else ""
    note(
        f"  caches: at most {human_bytes(memory.bound)}{where}; 16k tokens take {each:.0%} of 16 bits"
    )
    if not server.engine.model_provider.is_batchable:
        note("  requests are served one by one: the caches of this model do not join in a batch")
    if not options.local and len(options.api_keys) == 1:
        note(
            "  one key: who has it can tell what others who have it asked (from times and reused tokens); "
            "give each user an --api-key, or let requests name a cache_salt"
        )
    note(f"chat: {server.url}/   API: {server.url}/v1   Ctrl-C ends it")
    asked: list[int] = []

    def end(number, frame) -> None:
        # Notes it, and no more: what a handler raises can be lost, or break what this thread is doing.
        asked.append(number)
        server.stop()

    for number in ENDING:
        on(number, end)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass  # another process was asked
    finally:
        with suppress(OSError):  # the terminal is gone
            note(
                "ending: replies have a few seconds, sessions are put away; again cuts replies short"
            )
        server.close(lambda: len(asked) > 1)
        for number in ENDING:  # Python takes handlers of its own away before the process ends
            signal.signal(number, signal.SIG_IGN)


def _follow(options: ServeOptions) -> None:
    """Run a process without clients: it does what rank 0 does, and ends with it."""
    engine = Engine(options, Metrics())
    ranks.follow(engine.ranks)
    engine.started()
    try:
        while True:
            engine.check()
            time.sleep(0.2)
    except KeyboardInterrupt:
        engine.stop_and_join()
