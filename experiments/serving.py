"""Measure `mlxkv serve` from outside: `python -m experiments.serving --model MODEL`. Linux, for /proc.

    reuse   seconds to the first token of a prompt that is new, of one that begins with it (another question about the
            same text), of other chats behind one system prompt, and once more after a restart, from --kv-disk; and the
            share of their bytes that these caches take, since what they have in common is stored once
    load    start-up; requests a second by 1 and by 8 clients, of /health and of completions of one token; memory and
            processor time with 2,000 connections that wait
    chunks  processor time for a request of 100,000 chunks of one byte, alone and eight of them at once, and how long
            /health takes at most meanwhile

Other processes of the machine only add time: the least of several rounds is printed, and processor seconds of the
server beside those of the clock. Each round has a `cache_salt` of its own, so that it finds nothing of another round.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.options import Parser, at_least, made_on
from mlxkv import console
from mlxkv.corpora import corpus
from mlxkv.errors import MachineError

MEASURES = ("reuse", "load", "chunks")
CLIENTS, CONNECTIONS, IDLE_SECONDS, BURST_SECONDS = (1, 8), 2000, 10.0, 3.0
CHUNKS = 100_000  # of one byte
QUESTIONS = ("What is this about?", "Who is named here?", "What happens in the end?")


@dataclass(frozen=True)
class Running:
    """A server that was started. seconds: until it listened."""

    port: int
    process: subprocess.Popen
    seconds: float

    def post(self, path: str, body: dict) -> Iterator[dict]:
        """Yield the documents of a stream."""
        line = HTTPConnection("127.0.0.1", self.port, timeout=600)
        line.request("POST", path, json.dumps(body | {"stream": True}))
        response = line.getresponse()
        assert response.status == 200, response.read()
        for data in iter(response.readline, b""):
            if data.startswith(b"data: {"):
                yield json.loads(data[6:])
        line.close()

    def get(self, path: str) -> dict:
        """Return a document."""
        line = HTTPConnection("127.0.0.1", self.port, timeout=60)
        line.request("GET", path)
        return json.loads(line.getresponse().read())

    def memory(self) -> int:
        """Return the bytes that the process has in memory."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    def processor(self) -> float:
        """Return the seconds of processor time that the process has taken."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def started(model: str, *options: str) -> Iterator[Running]:
    """Return a server on a free port."""
    command = [sys.executable, "-m", "mlxkv", "serve", "--model", model, "--port", "0", *options]
    start = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if line.startswith("chat: "):
                    break
            else:
                said = "".join(lines).strip()
                raise MachineError(f"[serve] ended before it listened: {said}")
            port = int(line.split()[1].rstrip("/").rpartition(":")[2])
            yield Running(port, process, time.perf_counter() - start)
        finally:
            process.terminate()
            process.communicate()


def first_token(server: Running, salt: int, *messages: str) -> tuple[float, float, int, int]:
    """Ask for one token. Returns the seconds until it came, by the clock and of the server's processor, and the tokens
    of the prompt, all and reused. messages: the system's, and the user's."""
    roles = ("system", "user")
    chat = [{"role": role, "content": text} for role, text in zip(roles, messages, strict=True)]
    body = {"messages": chat, "max_tokens": 1, "cache_salt": str(salt)}
    before, start = server.processor(), time.perf_counter()
    *_, last = server.post(
        "/v1/chat/completions", body | {"stream_options": {"include_usage": True}}
    )
    seconds, processor = time.perf_counter() - start, server.processor() - before
    usage = last["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return seconds, processor, usage["prompt_tokens"], cached


def reuse(model: str, rounds: int, tokens: int) -> tuple[dict[str, list], float]:
    """Rows of `first_token`, the fastest of all rounds, by what was asked; and the share of bytes."""
    text = "\n\n".join(corpus.interleaved("evaluation"))[: 10 * tokens // 3]
    rule = f"You answer questions about this text.\n\n{text}"
    found = defaultdict(list)

    def ask(what: str, *asked) -> None:
        found[what].append(first_token(*asked))

    with TemporaryDirectory() as folder:
        options = ("--kv-disk", folder, "--log-level", "error")
        with started(model, *options) as server:
            first_token(server, -1, rule[: 2 * tokens], QUESTIONS[0])  # kernels, buffers
            for i in range(rounds):
                document = f"{text}\n\n"
                ask("a text, new", server, i, "Be brief.", document + QUESTIONS[0])
                ask("another question about it", server, i, "Be brief.", document + QUESTIONS[1])
                ask("a system prompt, new", server, rounds + i, rule, QUESTIONS[0])
                for question in QUESTIONS[1:]:
                    ask("another chat behind it", server, rounds + i, rule, question)
            memory = server.get("/v1/kv")["memory"]
            bytes_apart = memory["sessions_allocated_bytes_apart"]
            share = memory["sessions_allocated_bytes"] / bytes_apart
        with started(model, *options) as server:
            for i in range(rounds):
                ask("the text after a restart", server, i, "Be brief.", document + QUESTIONS[2])
                ask("and once more", server, i, "Be brief.", document + QUESTIONS[0] + "?")
    return {what: min(rows) for what, rows in found.items()}, share


def burst(ask: Callable[[HTTPConnection], None], port: int, clients: int) -> tuple[int, float]:
    """Request of several clients, each with a connection that stays open, and the seconds that they took."""

    def client() -> int:
        line, count = HTTPConnection("127.0.0.1", port, timeout=60), 0
        while time.perf_counter() < end:
            ask(line)
            count += 1
        line.close()
        return count

    with ThreadPoolExecutor(clients) as pool:
        start = time.perf_counter()
        end = start + BURST_SECONDS
        counts = [job.result() for job in [pool.submit(client) for _ in range(clients)]]
        return sum(counts), time.perf_counter() - start


def _health(line: HTTPConnection) -> None:
    line.request("GET", "/health")
    assert line.getresponse().read() == b'{"status": "ok"}'


def _complete(line: HTTPConnection) -> None:
    line.request("POST", "/v1/completions", json.dumps({"prompt": "Once", "max_tokens": 1}))
    assert b"choices" in line.getresponse().read()


def load(model: str, rounds: int) -> dict[str, float]:
    """Return the best of all rounds, by what was measured; of memory the most."""
    found = defaultdict(list)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(CONNECTIONS + 256, hard)), hard))
    for _ in range(rounds):
        with started(model, "--log-level", "error") as server:
            found["start-up, s"].append(server.seconds)
            found["start-up, s of processor"].append(server.processor())
            with ExitStack() as stack:
                memory = server.memory()
                for _ in range(CONNECTIONS):
                    stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                _health(HTTPConnection("127.0.0.1", server.port, timeout=60))  # all are accepted
                mib = (server.memory() - memory) / (1 << 20)
                found[f"memory of {CONNECTIONS:,} idle connections, MiB"].append(-mib)
                before = server.processor()
                time.sleep(IDLE_SECONDS)
                share = (server.processor() - before) / IDLE_SECONDS
                found["processor meanwhile, %"].append(100 * share)
            for name, ask in (("/health", _health), ("completions of a token", _complete)):
                for clients in CLIENTS:
                    before = server.processor()
                    count, seconds = burst(ask, server.port, clients)
                    found[f"{name}, {clients} at once, 1/s"].append(-count / seconds)
                    each = 1000 * (server.processor() - before) / count
                    found[f"{name}, {clients} at once, ms of processor"].append(each)
    return {what: abs(min(values)) for what, values in found.items()}


def chunks(model: str, rounds: int) -> dict[str, float]:
    """Return the best of all rounds, by what was measured."""
    found = defaultdict(list)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    request = head + CHUNKS * b"1\r\n \r\n" + b"0\r\n\r\n"

    def send(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=600) as line:
            line.sendall(request)
            assert line.recv(12) in (b"HTTP/1.1 400", b"HTTP/1.1 413")

    for _ in range(rounds):
        with started(model, "--log-level", "error") as server:
            line = HTTPConnection("127.0.0.1", server.port, timeout=600)
            for clients in CLIENTS:
                _health(line)
                before, longest = server.processor(), 0.0
                with ThreadPoolExecutor(clients) as pool:
                    jobs = [pool.submit(send, server.port) for _ in range(clients)]
                    while not all(job.done() for job in jobs):
                        start = time.perf_counter()
                        _health(line)
                        longest = max(longest, time.perf_counter() - start)
                        time.sleep(0.01)
                for job in jobs:
                    job.result()
                name = f"{clients} at once"
                found[f"{name}: /health at most, s"].append(longest)
                found[f"{name}: processor, s"].append(server.processor() - before)
    return {what: min(values) for what, values in found.items()}


def main(argv: list[str] | None = None) -> None:
    parser = Parser("serving", __doc__)
    parser.add_argument("measures", nargs="*", default=MEASURES, help=", ".join(MEASURES))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1300, help="of the text, about")
    args = parser.parse_args(argv)
    if unknown := {*args.measures} - {*MEASURES}:
        parser.error(f"unknown {', '.join(unknown)}; choose from {', '.join(MEASURES)}")
    at_least("--rounds", args.rounds, 1)
    start, document = time.perf_counter(), {}
    if "reuse" in args.measures:
        document["reuse"], share = reuse(args.model, args.rounds, args.tokens)
        console.say(
            "| first token | clock | processor | prompt, reused tokens |\n|---|---|---|---|"
        )
        for what, (seconds, processor, total, cached) in document["reuse"].items():
            console.say(f"| {what} | {seconds:.2f} s | {processor:.2f} s | {total}, {cached} |")
        console.say(f"all sessions take {share:.0%} of the bytes of separate copies")
    if "load" in args.measures:
        document["load"] = load(args.model, args.rounds)
    if "chunks" in args.measures:
        document["chunks"] = chunks(args.model, args.rounds)
    for what, value in {**document.get("load", {}), **document.get("chunks", {})}.items():
        console.say(f"| {what} | {value:.4g} |")
    console.print_json(document | made_on(start))


if __name__ == "__main__":
    console.run_tool(main)
