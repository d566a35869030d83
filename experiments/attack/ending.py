"""The end: signals once, twice and often, beside replies, saves and busy clients, and closed terminals."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

from experiments.attack.frame import Attempt, ask, command, raw, server
from experiments.fixtures import QWEN
from mlxkv.serve.run import GRACE, TOLD

MODEL, TOKENS = QWEN, 1500  # of a reply that is not done when the signal comes
PROMPTS = [f"{i} The river is long and nobody knows the way home. " * 12 for i in range(3)]
TERM, INT, HUP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MOST = GRACE + TOLD + 20  # seconds until a server has ended, on a busy machine
ONCE = [((one,), 0.0) for one in (TERM, INT, HUP)]
TWICE = [((TERM, TERM), gap) for gap in (0.0, 0.05, 0.3)]
OFTEN = [((INT, INT), 0.05), ((HUP, HUP), 0.05), ((INT, TERM, HUP) * 10, 0.01), ((HUP, TERM), 0.3)]


def attempts(short: bool) -> Iterator[Attempt]:
    for numbers, gap in TWICE[1:2] if short else ONCE + TWICE + OFTEN:
        yield from _served(numbers, gap, not short and len(numbers) == 2)
    yield from _started(not short)
    for number in () if short else (TERM, INT):
        for _ in range(3):
            yield _beside_clients(number)
    yield from _terminal(short)
    if not short:
        yield from _interrupted_saves()


def _stream(port: int) -> tuple[bytes, str]:
    body = {"prompt": "Once", "max_tokens": TOKENS, "stream": True, "logit_bias": {"2": -100}}
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return raw(port, head.encode() + data, 60)


def _files(folder: str) -> tuple[list[Path], list[Path]]:
    """Sessions, and drafts of sessions."""
    files = [path for path in Path(folder).rglob("*.safetensors") if path.is_file()]
    drafts = [path for path in files if path.name.startswith(".")]
    return [path for path in files if path not in drafts], drafts


def _served(numbers: tuple, gap: float, again: bool) -> Iterator[Attempt]:
    """Signals while one client reads a stream and another waits for a whole reply."""
    said = " ".join(number.name for number in numbers[:3])
    name = f"{said}{' ...' * (len(numbers) > 3)}, {gap:g} s apart"
    with TemporaryDirectory() as folder:
        running = server("--kv-disk", folder, model=MODEL)
        for prompt in PROMPTS:
            ask(running.port, {"prompt": prompt, "max_tokens": 2})
        with ThreadPoolExecutor(2) as pool:
            stream = pool.submit(_stream, running.port)
            whole = pool.submit(ask, running.port, {"prompt": "Twice", "max_tokens": TOKENS})
            time.sleep(1.0)
            start = time.monotonic()
            for number in numbers:
                running.process.send_signal(number)
                time.sleep(gap)
            code = _wait(running.process, MOST)
            seconds = time.monotonic() - start
            (text, how), (status, data) = stream.result(), whole.result()
        log = running.output()
        running.close()
        yield Attempt(
            f"{name}: ends well", code == 0 and "Traceback" not in log, f"{code} {log[-200:]!r}"
        )
        hurry = GRACE if len(numbers) > 1 and gap else MOST
        yield Attempt(f"{name}: in {hurry:g} s", seconds < hurry, f"{seconds:.1f} s")
        told = b'"ending"' in text or b"[DONE]" in text
        yield Attempt(f"{name}: the stream is told", told and how == "eof", f"{how} {text[-90:]!r}")
        whole_told = (status == 503 and b'"ending"' in data) or status == 200
        yield Attempt(f"{name}: the other client is told", whole_told, f"{status} {data[:90]!r}")
        kept, drafts = _files(folder)
        yield Attempt(
            f"{name}: {len(kept)} sessions kept", len(kept) >= len(PROMPTS) and not drafts
        )
        if not again:
            return
        with server("--kv-disk", folder, model=MODEL) as later:
            status, data = ask(later.port, {"prompt": PROMPTS[0], "max_tokens": 2})
            known = json.loads(data)["kv"]["cached_tokens"] if status == 200 else 0
        yield Attempt(f"{name}: they are found again", known > 50, str(known))


def _wait(process: subprocess.Popen, seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def _started(whole: bool) -> Iterator[Attempt]:
    """Signals while the model is loaded."""
    line = [sys.executable, "-m", "mlxkv", "serve", "--model", MODEL, "--port", "0"]
    for number in (INT, TERM, HUP) if whole else (INT,):
        for wait in (0.3, 1.2) if whole else (1.0,):
            process = subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
            time.sleep(wait)
            process.send_signal(number)
            code = _wait(process, 20)
            _, err = process.communicate()
            fine = code in (0, -number, 128 + number) and b"Traceback" not in err
            name = f"{number.name} {wait:g} s after the start"
            yield Attempt(name, fine, f"{code} {err[-120:]!r}")


def _beside_clients(number: signal.Signals) -> Attempt:
    """A signal arrives while clients keep the main thread busy."""
    running, over = server(model=MODEL), Event()

    def ask_on() -> None:
        while not over.is_set():
            raw(
                running.port,
                b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
                2,
            )

    def quiet() -> None:
        with suppress(OSError):
            ask_on()

    clients = [Thread(target=quiet) for _ in range(3)]
    for client in clients:
        client.start()
    time.sleep(0.5)
    running.process.send_signal(number)
    code = _wait(running.process, MOST)
    over.set()
    for client in clients:
        client.join()
    running.close()
    return Attempt(f"{number.name} beside 3 clients that ask all the time", code == 0, str(code))


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *words: str):
        self.pid, self.line = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup around all of this ignores
            os.execv(sys.executable, [sys.executable, "-m", "mlxkv", *words])
        self.said = b""

    def read_until(self, text: bytes, seconds: float = 60) -> bool:
        end = time.monotonic() + seconds
        while text not in self.said and time.monotonic() < end:
            if select.select([self.line], [], [], 0.2)[0]:
                try:
                    self.said += os.read(self.line, 1 << 16)
                except OSError:
                    break
        return text in self.said

    def write(self, text: str) -> None:
        os.write(self.line, text.encode())

    def close(self) -> None:
        """Close the terminal, as its window does: the kernel sends SIGHUP."""
        os.close(self.line)

    def code(self, seconds: float = MOST) -> int | None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return None


def _terminal(short: bool) -> Iterator[Attempt]:
    with TemporaryDirectory() as folder:
        one = Terminal("serve", "--model", MODEL, "--port", "0", "--kv-disk", folder)
        one.read_until(b"/v1 ")
        port = int(one.said.split(b"127.0.0.1:")[1].split(b"/")[0])
        ask(port, {"prompt": PROMPTS[0], "max_tokens": 2})
        one.close()
        code = one.code()
        yield Attempt("serve: its terminal is closed", code == 0, str(code))
        kept, drafts = _files(folder)
        yield Attempt(
            "serve: ... and its sessions are kept", bool(kept) and not drafts, str(drafts)
        )
    ways = {"SIGTERM": 143, "closed": 129, "SIGHUP": 129}
    for way in ("closed",) if short else ways:
        for busy in (True,) if short else (False, True):
            yield from _chat(way, ways[way], busy)


def _chat(way: str, code: int, busy: bool) -> Iterator[Attempt]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "s.safetensors"
        one = Terminal("chat", "--model", MODEL, "--max-tokens", "800")
        one.read_until(b"> ")
        one.write("Hi\n")
        one.read_until(b"tokens/s")
        one.write(f"/save {path}\n")
        one.read_until(b"saved ")
        before = path.read_bytes()
        if busy:
            one.write("Tell me a long story of the sea\n")
            time.sleep(0.4)
        one.close() if way == "closed" else os.kill(one.pid, getattr(signal, way))
        found = one.code()
        name = f"chat: {way} {'in a reply' if busy else 'at the prompt'}"
        yield Attempt(name, found in (0, code), str(found))
        drafts = _files(folder)[1]
        yield Attempt(
            f"{name}: what was saved is whole", path.read_bytes() == before and not drafts
        )


def _interrupted_saves() -> Iterator[Attempt]:
    """Signals at any moment of a /save over a session that is there."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "s.safetensors"
        command("chat", "--model", MODEL, typed=f"Hi\n/save {path}\n".encode())
        for number in (TERM, INT):
            for wait in (0.0, 0.01, 0.05):
                one = Terminal("chat", "--model", MODEL, "--max-tokens", "40")
                one.read_until(b"> ")
                one.write("Hi again\n")
                one.read_until(b"tokens/s")
                one.write(f"/save {path}\n")
                time.sleep(wait)
                os.kill(one.pid, number)
                if number is INT:
                    one.write("/exit\n")
                code = one.code()
                drafts = _files(folder)[1]
                ran = command(
                    "chat", "--model", MODEL, "--load", str(path), "--prompt", "a", "--json"
                )
                fine = not drafts and (ran.code == 0 or not path.exists())
                name = f"{number.name} {wait:g} s after /save"
                yield Attempt(
                    f"{name}: nothing is half written", fine, f"{code} {drafts} {ran.note}"
                )
