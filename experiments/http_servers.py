"""HTTP servers that could carry replies, with a generator that costs nothing behind each of them:
`python -m experiments.http_servers`.

Servers that are not installed are left out: uvicorn, hypercorn, waitress, cheroot are no dependencies.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import multiprocessing
import resource
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from threading import Thread

from experiments.attack.connections import busy, opened
from experiments.attack.frame import raw

EVENTS, PAUSE, STREAMS, LOOPS = 100, 0.01, 16, 300
DESCRIPTORS, IDLE = 1024, 1500  # of each server, and connections that are opened and left
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
HELLO = b'{"status": "ok"}'


def events() -> Iterator[bytes]:
    """A stream whose events, made in another thread as by the engine, say when they were made."""
    queue: Queue = Queue()

    def make() -> None:
        for _ in range(EVENTS):
            time.sleep(PAUSE)
            queue.put(b"data: %.7f\n\n" % time.perf_counter())
        queue.put(None)

    Thread(target=make, daemon=True).start()
    return iter(queue.get, None)


def standard(port: int) -> None:
    """What mlx-lm has: http.server, HTTP/1.0."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.do_GET()

        def do_GET(self):
            stream = self.path == "/stream"
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream" if stream else "application/json")
            self.end_headers()
            for part in events() if stream else [HELLO]:
                self.wfile.write(part)

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 1024

        def handle_error(self, *_):
            pass

    Server(("127.0.0.1", port), Handler).serve_forever()


def own(port: int) -> None:
    """mlxkv's: h11 under sockets of our own."""
    from mlxkv.serve.http.connections import Connections

    class Server(Connections):
        def answer(self, line):
            if line.refused is not None:
                line.start(line.refused.status, [("Content-Length", "0")])
            elif line.head.target == b"/stream":
                line.start(200, [("Content-Type", "text/event-stream")])
                for part in events():
                    line.write(part)
            else:
                line.start(200, [("Content-Length", str(len(HELLO)))])
                line.write(HELLO)
            line.finish()

    Server(socket.AF_INET, ("127.0.0.1", port), 30, 8 << 20, 256).serve_forever()


def wsgi(environ, start_response):
    stream = environ["PATH_INFO"] == "/stream"
    length = [] if stream else [("Content-Length", str(len(HELLO)))]
    start_response("200 OK", [("Content-Type", "text/event-stream"), *length])
    return events() if stream else [HELLO]


async def asgi(scope, receive, send):
    stream = scope["path"] == "/stream"
    length = [] if stream else [(b"content-length", b"%d" % len(HELLO))]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    if stream:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()

        def pump() -> None:
            for part in events():
                loop.call_soon_threadsafe(queue.put_nowait, part)
            loop.call_soon_threadsafe(queue.put_nowait, None)

        Thread(target=pump, daemon=True).start()
        while (part := await queue.get()) is not None:
            await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"" if stream else HELLO})


def uvicorn(port: int) -> None:
    import uvicorn

    uvicorn.run(asgi, host="127.0.0.1", port=port, http="h11", log_level="critical", lifespan="off")


def hypercorn(port: int) -> None:
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    asyncio.run(serve(asgi, config))


def waitress(port: int) -> None:
    import waitress

    waitress.serve(
        wsgi,
        host="127.0.0.1",
        port=port,
        threads=64,
        connection_limit=900,
        asyncore_use_poll=True,
        send_bytes=1,
        _quiet=True,
    )


def cheroot(port: int) -> None:
    from cheroot.wsgi import Server

    Server(("127.0.0.1", port), wsgi, numthreads=64, max=256, request_queue_size=1024).start()


def stream(port: int) -> list[float]:
    """Seconds from each event's making to its arrival."""
    line, out = HTTPConnection("127.0.0.1", port, timeout=60), []
    line.request("GET", "/stream")
    response = line.getresponse()
    while text := response.readline():
        if text.startswith(b"data: "):
            out.append(time.perf_counter() - float(text[6:]))
    line.close()
    return out


def loop(port: int) -> float:
    """Requests a second, one after another, on a connection that is kept where that is possible."""
    line, start = HTTPConnection("127.0.0.1", port, timeout=60), time.perf_counter()
    for _ in range(LOOPS):
        line.request("GET", "/health")
        line.getresponse().read()
    return LOOPS / (time.perf_counter() - start)


def limited(serve: Callable[[int], None], port: int) -> None:
    """Serve with few descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    serve(port)


def measure(name: str, serve: Callable[[int], None]) -> dict:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=limited, args=(serve, port), daemon=True)
    start = time.perf_counter()
    process.start()
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.005)
    started = time.perf_counter() - start
    try:
        stream(port)
        with ThreadPoolExecutor(STREAMS) as pool:
            late = sorted(x for one in pool.map(stream, [port] * STREAMS) for x in one)
        rate = statistics.median(loop(port) for _ in range(3))
        half, _ = raw(port, GET.replace(b"/health", b"/stream") + b"\r\n", 10, half_close=True)
        both = (
            b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\nConnection: close\r\n\r\n0\r\n\r\n"
        )
        smuggled, _ = raw(port, GET.replace(b"GET", b"POST") + both, 5)
        with opened(port, IDLE, GET[:9]):
            share = busy(process.pid, 2)
            answer, _ = raw(port, GET + b"Connection: close\r\n\r\n", 5)
    finally:
        process.kill()
        process.join()
    return {
        "server": name,
        "start_s": round(started, 2),
        "event_ms_median": round(1e3 * statistics.median(late), 2),
        "event_ms_99": round(1e3 * late[int(0.99 * len(late))], 2),
        "requests_per_s": round(rate),
        "half_closed_events": half.count(b"data: "),
        "length_and_chunks": smuggled[:12].decode(errors="replace"),
        "idle_share": round(share, 2),
        "answers_beside_idle": answer[:12].decode(errors="replace"),
    }


def main() -> None:
    for name, serve in {
        "http.server": standard,
        "mlxkv": own,
        "uvicorn": uvicorn,
        "hypercorn": hypercorn,
        "waitress": waitress,
        "cheroot": cheroot,
    }.items():
        if name in ("http.server", "mlxkv") or importlib.util.find_spec(name):
            print(json.dumps(measure(name, serve)), flush=True)


if __name__ == "__main__":
    main()
