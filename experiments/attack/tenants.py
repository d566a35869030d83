"""Several users of one server: nobody learns what others ask, from counts, times, bytes or files."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.attack.frame import Attempt, alive, ask, server
from experiments.fixtures import QWEN, TINY

KEYS = ("operator-key", "victim-key", "attacker-key")
OPTIONS = [word for key in KEYS for word in ("--api-key", key)]
SECRET, PIN = "My bank PIN is ", "4071"
LONG = "The river is long and the boat is small, and nobody knows the way home. " * 8


def attempts(short: bool) -> Iterator[Attempt]:
    for model in (QWEN,) if short else (QWEN, TINY):
        with TemporaryDirectory() as folder:
            options = (*OPTIONS, "--kv-disk", folder)
            with server(*options, model=model) as running:
                yield from _pins(model, running.port, KEYS[1:], ({}, {}))
                yield from _times(model, running.port, 0 if short else 5)
                yield from _numbers(model, running.port)
            yield from _restart(model, options, Path(folder))
    with server(model=QWEN) as running:
        for name in ("cache_salt",) if short else ("cache_salt", "user"):
            victim, others = {name: "victim"}, [{}, {name: "victi"}, {name: "x" * 512}]
            for other in others[:1] if short else others:
                text = f"{name} {str(other)[:30]}"
                yield from _pins(text, running.port, ("", ""), (victim, other))
        yield from _names(running.port, 20 if short else 300)


def reply(port: int, key: str, prompt: str, **more) -> dict:
    """The document of a reply of one token."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    status, data = ask(port, {"prompt": prompt, "max_tokens": 1, **more}, headers=headers)
    return json.loads(data) if status == 200 else {"error": data}


def cached(found: dict) -> int:
    """Tokens that were known already, as either count tells."""
    details = found["usage"].get("prompt_tokens_details") or {}
    return max(found["kv"]["cached_tokens"], details.get("cached_tokens", 0))


def _pins(name: str, port: int, keys: tuple, more: tuple) -> Iterator[Attempt]:
    """Guess digit by digit: the right one would have more tokens cached than the others."""
    start = f"{name}: {SECRET}"
    reply(port, keys[0], start + PIN, **more[0])
    known, found = "", True
    for _ in PIN:
        counts = [cached(reply(port, keys[1], start + known + d, **more[1])) for d in "0123456789"]
        # The first guess may find less than the others: the attacker's own words come after it.
        best = [d for d in range(10) if counts[d] == max(counts)]
        found = found and len(best) == 1
        known += str(best[0])
    yield Attempt(f"{name}: a PIN is read digit by digit", not found and known != PIN, known)
    own = cached(reply(port, keys[0], start + PIN + "!", **more[0]))
    yield Attempt(f"{name}: its owner finds it", own > 0, str(own))


def _times(model: str, port: int, rounds: int) -> Iterator[Attempt]:
    """A prompt that another has asked takes as long as one that nobody has."""
    took: dict[str, list[float]] = {"fresh": [], "asked by another": [], "own": []}
    if not rounds:
        return
    for i in range(rounds):
        reply(port, KEYS[1], f"{i}{LONG}")
        for name, prompt in (("fresh", f"x{i}{LONG}"), ("asked by another", f"{i}{LONG}")):
            start = time.perf_counter()
            reply(port, KEYS[2], prompt)
            took[name].append(time.perf_counter() - start)
        start = time.perf_counter()
        reply(port, KEYS[2], f"{i}{LONG}")
        took["own"].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in took.items()}
    near, far = (abs(medians["asked by another"] - medians[n]) for n in ("fresh", "own"))
    yield Attempt(f"{model}: time tells what another asked", near < far, str(medians))


def _get(port: int, path: str, key: str) -> tuple[int, bytes]:
    line = HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        line.request("GET", path, headers={"Authorization": f"Bearer {key}"})
        response = line.getresponse()
        return response.status, response.read()
    finally:
        line.close()


def _numbers(model: str, port: int) -> Iterator[Attempt]:
    before = _get(port, "/v1/kv", KEYS[2])
    alone = reply(port, KEYS[2], "numbers" + LONG)
    reply(port, KEYS[1], "more numbers" + LONG)
    yield Attempt(f"{model}: /v1/kv tells of others", _get(port, "/v1/kv", KEYS[2]) == before)
    for key, status in zip((*KEYS, ""), (200, 403, 403, 401), strict=True):
        found = _get(port, "/metrics", key)[0]
        yield Attempt(f"{model}: /metrics for {key or 'no key'}", found == status, str(found))
    again = reply(port, KEYS[1], "numbers" + LONG)
    same = (again["kv"], again["usage"]) == (alone["kv"], alone["usage"])
    yield Attempt(
        f"{model}: bytes and counts of a prompt that another asked", same, str(again["kv"])
    )


def _restart(model: str, options: tuple, folder: Path) -> Iterator[Attempt]:
    files = [path.name for path in folder.rglob("*.safetensors")]
    told = [key for key in KEYS if any(key in name for name in files)]
    yield Attempt(f"{model}: names of files tell keys", bool(files) and not told, str(files[:2]))
    with server(*options, model=model) as running:
        other, own = (reply(running.port, key, "more numbers" + LONG) for key in KEYS[2:0:-1])
        yield Attempt(
            f"{model}: another's file after a restart", cached(other) == 0, str(other["kv"])
        )
        yield Attempt(f"{model}: one's own file after a restart", cached(own) > 0, str(own["kv"]))


def _names(port: int, count: int) -> Iterator[Attempt]:
    for name in ("user", "cache_salt"):
        for value in (1, True, ["a"], {"a": 1}, "a" * 513):
            status, data = ask(port, {"prompt": "a", name: value})
            fine = status == 400 and f"[{name}]" in data.decode()
            yield Attempt(f"{name} {str(value)[:20]}", fine, f"{status} {data[:80]!r}")
        for value in ("", "\x00", "\u202e", "../../x", "'\"\\", "\U0001f600" * 512):
            found = reply(port, "", "a" + name, **{name: value})
            yield Attempt(f"{name} {value[:20]!a} is taken", "kv" in found, str(found)[:80])
    found = [cached(reply(port, "", "many tenants", cache_salt=f"{i}")) for i in range(count)]
    yield Attempt(f"{count} salts find nothing of each other", not any(found))
    yield Attempt("the server is well after all of that", alive(port))
