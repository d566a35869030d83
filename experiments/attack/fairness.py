"""Many clients at once: each reads what it would read alone, none waits for another's whole reply."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

from experiments.attack.frame import Attempt, alive, server
from experiments.fixtures import QWEN, TINY
from mlxkv.bench.server.served import ServerProcess

LONG = "The river is long and nobody knows the way home. "
LEAST = 120.0  # seconds; and as long as all would take one after the other, ten times


def attempts(short: bool) -> Iterator[Attempt]:
    for model in (QWEN,) if short else (QWEN, TINY):
        with server("--prefill-step", "128", model=model) as running:
            yield from _greedy(model, running.port, 3 if short else 8, 1 if short else 5)
            if model == QWEN:  # the caches of tiny do not join: one after the other
                yield from _beside_long(model, running.port, 30 if short else 200)
            yield from _left(model, running, 3 if short else 12)
            yield Attempt(f"{model}: the server is well after all of that", alive(running.port))


def say(port: int, prompt: str, tokens: int, patience: float = LEAST, **more) -> tuple[str, float]:
    """The text of a greedy reply, or what came instead, and when it was there, by `time.monotonic`."""
    line = HTTPConnection("127.0.0.1", port, timeout=patience)
    body = {"prompt": prompt, "max_tokens": tokens, **more}
    try:
        line.request("POST", "/v1/completions", json.dumps(body))
        response = line.getresponse()
        data = response.read()
        text = (
            json.loads(data)["choices"][0]["text"] if response.status == 200 else f"{data[:80]!r}"
        )
    except OSError as error:
        text = f"no reply: {error}"
    finally:
        line.close()
    return text, time.monotonic()


def _greedy(model: str, port: int, clients: int, rounds: int) -> Iterator[Attempt]:
    """Patience is measured: ten times what all replies take one after the other, on this machine now."""
    prompts = [f"{i} Once upon a time " * (1 + i) for i in range(clients)]
    start = time.monotonic()
    alone = [say(port, prompt, 40)[0] for prompt in prompts]
    patience = max(LEAST, 10 * (time.monotonic() - start))
    for again in range(rounds):
        with ThreadPoolExecutor(clients) as pool:
            jobs = [pool.submit(say, port, prompt, 40, patience) for prompt in prompts]
            found = [job.result()[0] for job in jobs]
        wrong = [(i, text) for i, text in enumerate(found) if text != alone[i]]
        yield Attempt(
            f"{model}: {clients} at once say what each says alone ({again + 1})",
            not wrong,
            str(wrong[:1]),
        )


def _beside_long(model: str, port: int, words: int) -> Iterator[Attempt]:
    """A short request does not wait until a long prompt is read and answered."""
    with ThreadPoolExecutor(4) as pool:
        long = pool.submit(say, port, LONG * words, 60)
        time.sleep(0.3)
        shorts = [pool.submit(say, port, f"{i} Hi", 2) for i in range(3)]
        ends = [job.result()[1] for job in shorts]
        text, end = long.result()
    before = sum(one < end for one in ends)
    note = f"{before} of 3 before it; {text[:60]!r}"
    yield Attempt(
        f"{model}: short requests beside a prompt of {len(LONG) * words} letters", before == 3, note
    )
    with ThreadPoolExecutor(9) as pool:
        greedy = [pool.submit(say, port, f"{i} {LONG * 4}", 2 * words) for i in range(8)]
        time.sleep(0.3)
        _, mine = say(port, "Hello", 2)
        last = max(job.result()[1] for job in greedy)
    yield Attempt(
        f"{model}: a short request beside 8 of one client", mine < last, f"{mine - last:.1f} s"
    )


def _left(model: str, running: ServerProcess, clients: int) -> Iterator[Attempt]:
    """Clients that leave hold nothing."""
    body = json.dumps({"prompt": LONG * 40, "max_tokens": 900, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    for i in range(clients):
        with socket.create_connection(("127.0.0.1", running.port)) as line:
            line.sendall(head.encode() + body)
            time.sleep(0.1 * (i % 4))
    end, held = time.monotonic() + LEAST, {"": 1}
    while any(held.values()) and time.monotonic() < end:
        time.sleep(0.2)
        found = running.kv()
        memory = found["memory"]
        held = {name: memory[name] for name in ("active_bytes", "promised_bytes")}
        held["active_requests"] = found["active_requests"]
    yield Attempt(
        f"{model}: {clients} clients that left hold nothing", not any(held.values()), str(held)
    )
