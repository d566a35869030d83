"""Whose conversation is it: models that differ somewhere, and sessions and calibrations of another one."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import load_file, save_file

from experiments.attack._folders import edit, replace, whole
from experiments.attack.frame import Attempt, ask, command, server
from experiments.fixtures import QWEN
from mlxkv.chat.session import Session
from mlxkv.formats.saved.marks import same_model
from mlxkv.models import load
from mlxkv.models.catalog.fingerprint import fingerprint
from mlxkv.models.catalog.folder import check

WEIGHTS = "model.safetensors"
PROMPT = "Tell me about the goat, the boat and the river. " * 20


def attempts(short: bool) -> Iterator[Attempt]:
    with TemporaryDirectory() as name:
        base = Path(name)
        yield from _differing(base, short)
        yield from _sessions(base, short)


def _differing(base: Path, short: bool) -> Iterator[Attempt]:
    """Every tensor changed alone, in a copy; half of them together; the same model in other clothes."""
    folder = whole(base / "one", QWEN)
    first, weights = fingerprint(check(folder)), load_file(folder / WEIGHTS)
    other = whole(base / "other", QWEN)

    def mark(changed: dict) -> str:
        (other / WEIGHTS).unlink()
        save_file({**weights, **changed}, other / WEIGHTS, {"format": "mlx"})
        return fingerprint(check(other))

    drawn = random.Random(7)
    for name in sorted(weights)[:: 8 if short else 1]:
        found = mark({name: _noisy(weights[name], drawn.random())})
        yield Attempt(f"{name} differs", not same_model(found, first))
    half = drawn.sample(sorted(weights), len(weights) // 2)
    found = mark({name: _noisy(weights[name], 0.5) for name in half})
    yield Attempt("half of the tensors differ", not same_model(found, first))
    yield Attempt("the same weights, written again", same_model(mark({}), first))
    yield Attempt(
        "a copy of links", same_model(first, fingerprint(check(whole(base / "copy", QWEN))))
    )
    edit(other, "config.json", rope_theta=5.0)
    yield Attempt("config.json differs", not same_model(fingerprint(check(other)), first))


def _noisy(array: np.ndarray, seed: float) -> np.ndarray:
    noise = np.random.default_rng(int(seed * 1e9)).standard_normal(array.shape)
    return (array + 0.01 * noise).astype(array.dtype)


def _sessions(base: Path, short: bool) -> Iterator[Attempt]:
    """A conversation of one model, given to another: sessions of chat, and of the server."""
    one, two = whole(base / "a", QWEN), whole(base / "b", QWEN)
    # A quarter of the weights moves by one number. The ends of the file stay, as do names and shapes.
    data = bytearray((one / WEIGHTS).read_bytes())
    start = int.from_bytes(data[:8], "little") + 8 + (1 << 17)
    inside = np.frombuffer(data, np.float16, offset=start, count=len(data) // 8)
    inside[:] = np.roll(inside, 1)
    replace(two, WEIGHTS, bytes(data))
    marks = [fingerprint(check(folder)) for folder in (one, two)]
    yield Attempt("weights differ between the ends of the file", not same_model(*marks))
    saved = base / "s.safetensors"
    session = Session(load(str(one), "int4"), max_tokens=4)
    list(session.ask(PROMPT))
    session.save(str(saved))
    go_on = ("--load", str(saved), "--prompt", "Go on", "--max-tokens", "4")
    ran = command("chat", "--model", str(two), *go_on)
    yield Attempt("chat --load of another model's session", ran.one_line, ran.note)
    if short:
        return
    ran = command("chat", "--model", str(one), *go_on)
    yield Attempt("chat --load of its own session", ran.code == 0, ran.note)
    alone = _asked(two, None)
    _asked(one, base / "disk")
    found = _asked(two, base / "disk")
    yield Attempt("a server finds no session of another model", found == alone, f"{found} {alone}")


def _asked(folder: Path, disk: Path | None) -> tuple[int, str]:
    options = ("--kv-disk", str(disk)) if disk else ()
    with server(*options, model=str(folder)) as served:
        status, body = ask(served.port, {"prompt": PROMPT, "max_tokens": 12, "temperature": 0})
    return status, json.loads(body)["choices"][0]["text"]
