"""What rank 0 tells the other processes, as JSON, which runs no code: requests, their tokens, refusals.

What is read is checked for its shape and its types. No process but rank 0 needs what was said: messages
become tokens there.
"""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from mlxkv.errors import MachineError
from mlxkv.serve.http.request import Request
from mlxkv.serve.job import Job
from mlxkv.serve.refusals import Refused

# Fields of requests that are not told, and have defaults.
APART = ("prompt", "messages", "tools", "chat_template_kwargs", "user", "cache_salt")


def dump(thing: Any) -> bytes:
    return json.dumps(thing, allow_nan=False).encode()


def load(data: bytes) -> Any:
    """Raises MachineError for what is no JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise _wrong("no JSON") from None


def of_job(job: Job) -> list:
    """A request without its text, and its tenant."""
    return [{k: x for k, x in asdict(job.asked).items() if k not in APART}, job.tenant]


def to_job(told: Any) -> Job:
    """The same, as a job. Raises MachineError."""
    if len(checked(list, told)) != 2:
        raise _wrong("a request of other parts")
    hints = {name: hint for name, hint in get_type_hints(Request).items() if name not in APART}
    asked = Request(**_fields(hints, checked(dict[str, Any], told[0])))
    return Job(asked, checked(str, told[1]))


def to_meeting(told: Any) -> tuple[Job | None, list[int], int]:
    """A request that begins, or None; numbers of those that end; steps. Raises MachineError."""
    if len(checked(list, told)) != 3:
        raise _wrong("a meeting of other parts")
    job = None if told[0] is None else to_job(told[0])
    return job, checked(list[int], told[1]), checked(int, told[2])


def of_prompt(prompt: tuple) -> list:
    """Tokens, segments, their kinds, and the state a reply begins in."""
    tokens, segments, kinds, state = prompt
    return [tokens, [len(segment) for segment in segments], kinds, state]


def to_prompt(told: Any) -> tuple:
    """The same. Raises MachineError."""
    if len(checked(list, told)) != 4:
        raise _wrong("a prompt of other parts")
    tokens, lengths, kinds, state = told
    sizes = checked(list[int], lengths)
    if sum(sizes) != len(checked(list[int], tokens)) or len(sizes) != len(checked(list, kinds)):
        raise _wrong("segments that are not the prompt")
    segments, start = [], 0
    for length in lengths:
        segments.append(tokens[start : start + length])
        start += length
    return tokens, segments, checked(list[str], kinds), checked(str, state)


def of_error(error: Exception) -> dict:
    """A Refused, or the text of another error."""
    if not isinstance(error, Refused):
        return {"error": f"{type(error).__name__}: {error}"}
    names = ("status", "message", "code", "retry", "details")
    return {name: getattr(error, name) for name in names}


def to_error(told: Any) -> Exception:
    """The same, as an error to raise. Raises MachineError itself, if it is none."""
    told = checked(dict[str, Any], told)
    if "error" in told:
        return MachineError(f"[serve] in rank 0: {checked(str, told['error'])}")
    names = {
        "status": int,
        "message": str,
        "code": str | None,
        "retry": int | None,
        "details": dict,
    }
    return Refused(**_fields(names, told))


def checked(kind: Any, thing: Any) -> Any:
    """`thing`, which came as JSON, if it is a `kind`: a type, a dataclass, or one of typing. Raises
    MachineError."""
    kinds, parts = get_origin(kind), get_args(kind)
    if kind is Any or (kind in (type(None), None) and thing is None):
        return thing
    if kinds in (Union, UnionType):
        for part in parts:
            try:
                return checked(part, thing)
            except MachineError:
                pass
    elif is_dataclass(kind):
        return kind(**_fields(get_type_hints(kind), checked(dict[str, Any], thing)))
    elif kinds is list and type(thing) is list:
        return [checked(parts[0], one) for one in thing]
    elif kinds is dict and type(thing) is dict:
        return {_name(parts[0], name): checked(parts[1], one) for name, one in thing.items()}
    elif type(thing) is kind or (kind is float and type(thing) is int):
        return thing
    raise _wrong(f"{type(thing).__name__} for {kind}")


def _name(kind: type, name: str) -> Any:
    """A key of an object, where JSON has texts alone."""
    if kind is not int:
        return name
    if not name.isdecimal():
        raise _wrong("a key that is no number")
    return int(name)


def _fields(hints: dict[str, Any], told: dict) -> dict:
    if told.keys() != hints.keys():
        raise _wrong(f"fields {sorted(told.keys() ^ hints.keys())}")
    return {name: checked(hint, told[name]) for name, hint in hints.items()}


def _wrong(what: str) -> MachineError:
    return MachineError(f"[serve] rank 0 tells what this process does not read: {what[:200]}")
