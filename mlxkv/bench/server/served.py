"""Start `mlxkv serve` in its own process, and ask it as a client that measures the reply."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from http.client import HTTPConnection
from tempfile import TemporaryFile
from urllib.parse import urlsplit

from mlxkv.errors import MachineError

START_SECONDS, END_SECONDS, SILENT_SECONDS = 600, 60, 600
CHAT = "/v1/chat/completions"


@dataclass
class TimedReply:
    """The reply to one request. first: seconds to the first text. seconds: to the end. error: what went
    wrong, or None. retries: how often the server asked to retry later."""

    text: str = ""
    first: float | None = None
    seconds: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    retries: int = 0
    steps: list[dict] = field(
        default_factory=list, repr=False
    )  # logprobs of a reply that was not streamed

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first token."""
        if self.first is None or self.tokens < 2 or self.seconds <= self.first:
            return None
        return (self.tokens - 1) / (self.seconds - self.first)


class ServerProcess:
    """A server on a free port of this machine. options: arguments of `mlxkv serve`."""

    def __init__(self, *options: str):
        command = [sys.executable, "-m", "mlxkv", "serve", "--port", "0", *options]
        self._file = TemporaryFile()  # noqa: SIM115 - as long as the server
        self.process = subprocess.Popen(command, stdout=self._file, stderr=self._file)
        try:
            self.port = self._wait()
        except BaseException:
            self.process.kill()
            self.process.wait()
            self._file.close()
            raise

    def _wait(self) -> int:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            for line in self.output().splitlines():
                if line.startswith("chat: "):
                    return urlsplit(line.split()[1]).port
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        last = (self.output().strip().splitlines() or ["no output"])[-1]
        raise MachineError(f"[bench] the server did not start: {last}")

    def output(self) -> str:
        """Text that the server wrote to stdout and stderr."""
        descriptor = self._file.fileno()  # pread: reading must not move the server's position
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> int:
        """Shut the server down cleanly. Returns its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
        code = self.process.wait()
        self._file.close()
        return code

    def rss(self) -> int:
        """Resident memory of the server, in bytes."""
        command = ["ps", "-o", "rss=", "-p", str(self.process.pid)]
        return 1024 * int(subprocess.run(command, capture_output=True, check=True).stdout)

    def kv(self) -> dict:
        """The JSON document of GET /v1/kv."""
        line = HTTPConnection("127.0.0.1", self.port, timeout=SILENT_SECONDS)
        try:
            line.request("GET", "/v1/kv")
            return json.loads(line.getresponse().read())
        finally:
            line.close()

    def ask(self, messages: list[dict], tokens: int, stream: bool = True) -> TimedReply:
        """Ask for one greedy chat completion of at most `tokens`. Without `stream`, the reply has the two
        likeliest tokens of every step. Retries when the server says so."""
        body: dict = {"messages": messages, "max_tokens": tokens, "stream": stream}
        body |= {"stream_options": {"include_usage": True}} if stream else {}
        body |= {} if stream else {"logprobs": True, "top_logprobs": 2}
        retries = 0
        while True:
            reply, wait = self._once(json.dumps(body).encode(), stream)
            reply.retries = retries
            if wait is None:
                return reply
            retries += 1
            time.sleep(wait)

    def _once(self, data: bytes, stream: bool) -> tuple[TimedReply, float | None]:
        reply, start = TimedReply(), time.perf_counter()
        line = HTTPConnection("127.0.0.1", self.port, timeout=SILENT_SECONDS)
        try:
            line.request("POST", CHAT, data)
            response = line.getresponse()
            if response.status != 200:
                after = response.headers.get("Retry-After")
                error = json.loads(response.read())["error"]["message"]
                reply.error = f"{response.status} {error}"
                return reply, None if after is None else float(after)
            if stream:
                self._stream(response, reply, start)
            else:
                _whole(json.loads(response.read()), reply)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reply.error = f"{type(error).__name__}: {error}"
        finally:
            line.close()
        reply.seconds = time.perf_counter() - start
        return reply, None

    def _stream(self, response, reply: TimedReply, start: float) -> None:
        ended = False
        for raw in response:
            line = raw.decode().strip()
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                ended = True
                break
            part = json.loads(line[6:])
            if "error" in part:
                reply.error = part["error"]["message"]
                return
            for choice in part["choices"]:
                if reply.first is None:
                    reply.first = time.perf_counter() - start
                reply.text += choice["delta"].get("content") or ""
            if usage := part.get("usage"):
                _usage(usage, reply)
        if not ended:
            reply.error = "the stream ended early"


def _usage(usage: dict, reply: TimedReply) -> None:
    reply.prompt_tokens, reply.tokens = usage["prompt_tokens"], usage["completion_tokens"]
    reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def _whole(found: dict, reply: TimedReply) -> None:
    choice = found["choices"][0]
    reply.text = choice["message"].get("content") or ""
    reply.steps = choice["logprobs"]["content"]
    _usage(found["usage"], reply)
