"""Processes of one model: what they tell each other runs no code, and is refused in other shapes."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterator
from pathlib import Path

import mlxkv
from experiments.attack.frame import Attempt
from mlxkv.errors import MachineError
from mlxkv.serve import told

READERS = (told.to_request, told.to_prompt, told.to_error)
PROMPT = [[1, 2, 3], [1, 2], ["system", "user"], "normal", [None]]
ERROR = {"status": 503, "message": "m", "code": None, "retry": 2, "details": {}}


class Harm:
    """What a pickle would run."""

    def __reduce__(self):
        return print, ("harm",)


def attempts(short: bool) -> Iterator[Attempt]:
    bad = [pickle.dumps(Harm()), b"", b"{", b"[" * 200_000, b"\xff\xfe", b"NaN x", b'"\\ud800' * 3]
    for data in bad:
        yield Attempt(f"{len(data)} bytes {data[:12]!r}", _refused(told.load, data))
    yield Attempt("no module of mlxkv reads pickles", not list(_pickles()))
    for thing in (None, 1, "a", [], {}, [PROMPT], {"error": 1}, [[1]] * 5, {"status": "503"}):
        for reader in READERS:
            if thing is None and reader is told.to_request:
                continue  # no request
            yield Attempt(f"{reader.__name__} of {thing}", _refused(reader, thing))
    draw = random.Random(3)
    for reader, good in ((told.to_prompt, PROMPT), (told.to_error, ERROR)):
        odd = []
        for _ in range(200 if short else 5000):
            thing = _changed(draw, json.loads(json.dumps(good)))
            try:
                reader(thing)
            except MachineError:
                pass
            except Exception as error:
                odd.append(f"{type(error).__name__} for {thing}")
        yield Attempt(f"{reader.__name__}: changed at random", not odd, str(odd[:1]))


def _refused(reader, thing) -> bool:
    try:
        reader(thing)
    except MachineError:
        return True
    except Exception:
        return False
    return False


def _pickles() -> Iterator[Path]:
    for path in Path(mlxkv.__file__).parent.rglob("*.py"):
        if "pickle.load" in path.read_text(encoding="utf-8"):
            yield path


def _changed(draw: random.Random, thing):
    """One value inside replaced by another."""
    odd = draw.choice([None, True, -1, 1 << 70, 0.5, "x", [], {}, [None], {"a": []}])
    if isinstance(thing, list | dict) and thing and draw.random() < 0.8:
        place = draw.choice(list(thing) if isinstance(thing, dict) else range(len(thing)))
        thing[place] = _changed(draw, thing[place])
        return thing
    return odd
