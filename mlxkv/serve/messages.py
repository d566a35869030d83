"""What rank 0 tells the other processes, as JSON, which runs no code: requests, their tokens, refusals.

What is read is checked for its shape and its types. No process but rank 0 needs texts: messages
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

# Fields of requests that are not data, and have defaults.
LOCAL_FIELDS = ("prompt", "messages", "tools", "chat_template_kwargs", "user", "cache_salt")


def dump(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


def load(data: bytes) -> Any:
    """Raises MachineError for what is no JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise _wrong("no JSON") from None


def job_to_json(job: Job) -> list:
    """A request without its text, and its tenant."""
    return [{k: x for k, x in asdict(job.request).items() if k not in LOCAL_FIELDS}, job.tenant]


def job_from_json(data: Any) -> Job:
    """The same, as a job. Raises MachineError."""
    if len(check_type(list, data)) != 2:
        raise _wrong("a request of other parts")
    hints = {
        name: hint for name, hint in get_type_hints(Request).items() if name not in LOCAL_FIELDS
    }
    request = Request(**_fields(hints, check_type(dict[str, Any], data[0])))
    return Job(request, check_type(str, data[1]))


def meeting_from_json(data: Any) -> tuple[Job | None, list[int], int]:
    """A request that begins, or None; numbers of those that end; steps. Raises MachineError."""
    if len(check_type(list, data)) != 3:
        raise _wrong("a meeting of other parts")
    job = None if data[0] is None else job_from_json(data[0])
    return job, check_type(list[int], data[1]), check_type(int, data[2])


def prompt_to_json(prompt: tuple) -> list:
    """Tokens, segments, their kinds, and the state a reply begins in."""
    tokens, segments, kinds, state = prompt
    return [tokens, [len(segment) for segment in segments], kinds, state]


def prompt_from_json(data: Any) -> tuple:
    """The same. Raises MachineError."""
    if len(check_type(list, data)) != 4:
        raise _wrong("a prompt of other parts")
    tokens, lengths, kinds, state = data
    sizes = check_type(list[int], lengths)
    if sum(sizes) != len(check_type(list[int], tokens)) or len(sizes) != len(
        check_type(list, kinds)
    ):
        raise _wrong("segments that are not the prompt")
    segments, start = [], 0
    for length in lengths:
        segments.append(tokens[start : start + length])
        start += length
    return tokens, segments, check_type(list[str], kinds), check_type(str, state)


def error_to_json(error: Exception) -> dict:
    """A Refused, or the text of another error."""
    if not isinstance(error, Refused):
        return {"error": f"{type(error).__name__}: {error}"}
    names = ("status", "message", "code", "retry", "details")
    return {name: getattr(error, name) for name in names}


def error_from_json(data: Any) -> Exception:
    """The same, as an error to raise. Raises MachineError itself, if it is none."""
    data = check_type(dict[str, Any], data)
    if "error" in data:
        return MachineError(f"[serve] in rank 0: {check_type(str, data['error'])}")
    names = {
        "status": int,
        "message": str,
        "code": str | None,
        "retry": int | None,
        "details": dict,
    }
    return Refused(**_fields(names, data))


def check_type(kind: Any, value: Any) -> Any:
    """`value`, which came as JSON, if it is a `kind`: a type, a dataclass, or one of typing. Raises
    MachineError."""
    kinds, parts = get_origin(kind), get_args(kind)
    if kind is Any or (kind in (type(None), None) and value is None):
        return value
    if kinds in (Union, UnionType):
        for part in parts:
            try:
                return check_type(part, value)
            except MachineError:
                pass
    elif is_dataclass(kind):
        return kind(**_fields(get_type_hints(kind), check_type(dict[str, Any], value)))
    elif kinds is list and type(value) is list:
        return [check_type(parts[0], item) for item in value]
    elif kinds is dict and type(value) is dict:
        return {_name(parts[0], name): check_type(parts[1], item) for name, item in value.items()}
    elif type(value) is kind or (kind is float and type(value) is int):
        return value
    raise _wrong(f"{type(value).__name__} for {kind}")


def _name(kind: type, name: str) -> Any:
    """A key of an object, where JSON has texts alone."""
    if kind is not int:
        return name
    if not name.isdecimal():
        raise _wrong("a key that is no number")
    return int(name)


def _fields(hints: dict[str, Any], data: dict) -> dict:
    if data.keys() != hints.keys():
        raise _wrong(f"fields {sorted(data.keys() ^ hints.keys())}")
    return {name: check_type(hint, data[name]) for name, hint in hints.items()}


def _wrong(what: str) -> MachineError:
    return MachineError(f"[serve] rank 0 tells what this process does not read: {what[:200]}")
