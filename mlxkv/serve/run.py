"""Start and end `mlxkv serve`: load the model, listen, and save sessions at the end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import mlx.core as mx

from mlxkv.catalog.rendering import RENDERER
from mlxkv.console import ENDING, PlainLog, human_bytes, note, on
from mlxkv.errors import MachineError, UserError
from mlxkv.generate.usage import Usage
from mlxkv.loading import plans, quality_check
from mlxkv.metal.launch import device_type
from mlxkv.options import PARENT
from mlxkv.serve.engine import Engine
from mlxkv.serve.http.app import METHODS, Keys, Origins, RequestGuard, application
from mlxkv.serve.http.connection import HTTPServer, Limits, listen
from mlxkv.serve.models import Models
from mlxkv.serve.options import ServeOptions
from mlxkv.serve.reading import Worker

SHOWN = 1 << 14  # tokens whose memory is told at the start, or the model's context
GRACE = 5.0  # seconds for active replies on shutdown; Docker kills after 10
TOLD = 2.0  # seconds for their clients to receive the error


class Server:
    """The models and the connections of their clients. Raises the errors of loading, and OSError if it cannot
    listen."""

    def __init__(self, options: ServeOptions):
        self._asked = 0
        self._parent = os.environ.get(PARENT)  # None: it does not end with its parent
        worker = Worker()
        worker.start()  # it gets ready while the model is loaded
        try:
            self.models = models = Models(options, worker)
        except KeyboardInterrupt:  # no state to save, and loading cannot be interrupted
            os._exit(128 + signal.SIGINT)
        except Exception:
            worker.close()
            raise
        self.loaded_model, self.engine = models.first, models.first.engine
        try:
            self.socket = listen(options.host, options.port)
        except OSError:
            self.loaded_model.close()
            raise
        self.server_address = self.socket.getsockname()
        keys, limits = Keys(), Limits()
        guard = Origins(
            RequestGuard(options, keys, limits, application(models, keys, limits)),
            allow_origins=options.origins,
            allow_methods=METHODS,
            allow_headers=["*"],
        )
        self.http_server = HTTPServer(guard, limits, self._tick, self._end)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        host = socket.gethostname() if host in ("0.0.0.0", "::") else host  # what others can open
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def serve(self) -> None:
        """Serve until `stop`; then wait `GRACE` seconds for active replies, and save sessions. Raises the fatal error
        of the engine."""
        asyncio.run(self.http_server.serve([self.socket]))
        if self.engine.problem is not None:
            raise self.engine.problem

    def stop(self) -> None:
        """End `serve`. For any thread and for signal handlers. A second call cuts replies short."""
        self._asked += 1

    def _tick(self) -> bool:
        has_parent = self._parent in (None, str(os.getppid()))
        return self.engine.has_ended or self._asked > 0 or not has_parent

    async def _end(self) -> None:
        with suppress(OSError):  # the terminal is gone
            note(
                f"stopping: replies have {GRACE:.0f} s to finish, then sessions are saved; Ctrl-C again stops at once"
            )
        await self._settle(GRACE, lambda: self._asked > 1)
        await asyncio.to_thread(self.loaded_model.close)
        await self.models.close()
        await self._settle(TOLD, lambda: False)

    async def _settle(self, seconds: float, hurry: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while self.models.active and time.monotonic() < end and not hurry():
            await asyncio.sleep(0.02)


def check_further(options: ServeOptions) -> None:
    """Raise UserError for models that are loaded later and do not fit, before a client is told."""
    if options.memory is not None or options.context is not None:
        for name in options.models[1:]:
            plans.fitting(name, options.kv, options.memory, options.context)


def run_server(options: ServeOptions) -> None:
    """Serve until Ctrl-C, SIGTERM or SIGHUP. A second one cuts replies short; sessions are still saved."""
    log = logging.StreamHandler()
    log.setFormatter(PlainLog())
    level = logging.ERROR if options.log_level == "error" else logging.WARNING
    logging.basicConfig(level=level, handlers=[log])
    logging.getLogger("mlxkv").setLevel(options.log_level.upper())
    # transformers warns about long prompts; their length is checked here.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    group = mx.distributed.init()
    if group.rank():
        _follow(options)
        return
    if group.size() > 1 and len(options.models) > 1:
        raise UserError(f"[--model] one over several machines; got {', '.join(options.models)}")
    check_further(options)
    try:
        server = Server(options)
    except socket.gaierror as error:
        raise UserError(f"[--host] no such address; got {options.host!r} ({error})") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise MachineError(
            f"[--port] cannot listen on {options.host}:{options.port}: {reason}; choose another port, or 0 for a free "
            "one"
        ) from None
    RENDERER.end()  # requests are rendered by the workers
    loaded, memory = server.loaded_model.loaded, server.engine.memory
    loaded.print_report(device_type())
    if group.size() == 1:
        quality_check.warn(loaded)
    length = min(loaded.context or SHOWN, SHOWN)
    cached = Usage(length, memory.in_use(length), memory.fp16(length), 0)
    place = f" in each of {size} processes" if (size := group.size()) > 1 else ""
    note(
        f"  caches: at most {human_bytes(memory.bound)}{place}; {length:,} tokens take {cached.saving()}"
    )
    if not server.engine.is_batchable:
        note("  requests are served one by one: the caches of this model do not join in a batch")
    if not options.local and len(options.api_keys) == 1:
        note(
            "  one key: everyone who has it can tell what the others asked (from times and reused tokens); "
            "give each user an --api-key, or let requests name a cache_salt"
        )
    if others := server.models.names[1:]:
        note(f"  loaded on first use: {', '.join(others)}")
    note(f"chat: {server.url}/   API: {server.url}/v1   Ctrl-C ends it")
    for number in ENDING:
        on(number, lambda *_: server.stop())  # an exception in a handler could be lost
    server.serve()
    for number in ENDING:  # Python removes its handlers before the process ends
        signal.signal(number, signal.SIG_IGN)


def _follow(options: ServeOptions) -> None:
    """Run a process without clients, which does the steps of rank 0 and ends with it."""
    engine = Engine(options)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches rank 0, too
    for number in ENDING - {signal.SIGINT}:
        on(number, lambda *_: engine.ranks.end())
    engine.wait_until_ready()
    while not engine.has_ended:
        time.sleep(0.2)
    engine.stop_and_join()
    if engine.problem is not None:
        raise engine.problem
