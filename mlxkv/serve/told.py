"""What rank 0 tells the other processes, as JSON, which runs no code: requests, their tokens, refusals.

What is read is checked for its shape and its types. No process but rank 0 needs what was said: messages
become tokens there.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from mlx_lm import server

from mlxkv.errors import MachineError
from mlxkv.serve.job import Arguments, Job
from mlxkv.serve.refusals import Refused

# Fields of mlx-lm's arguments that are told; the names of the model are the same in all processes.
APART = ("model", "chat_template_kwargs", "job")
ONE = server.ModelDescription("default_model", "default_model", None)


def dump(thing: Any) -> bytes:
    return json.dumps(thing, allow_nan=False).encode()


def load(data: bytes) -> Any:
    """Raises MachineError for what is no JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise _wrong("no JSON") from None


def of_request(request: tuple | None) -> dict | None:
    """mlx-lm's (CompletionRequest, Arguments)."""
    if request is None:
        return None
    asked, args = request
    told = {f.name: getattr(args, f.name) for f in fields(args) if f.name not in APART}
    told = {name: asdict(x) if is_dataclass(x) else x for name, x in told.items()}
    return told | {"kind": asked.request_type, "tenant": args.job.tenant}


def to_request(told: Any) -> tuple | None:
    """The same without its text. Raises MachineError."""
    if told is None:
        return None
    told = checked(dict[str, Any], told)
    kind, whose = checked(str, told.pop("kind", None)), checked(str, told.pop("tenant", None))
    hints = {n: h for n, h in get_type_hints(Arguments).items() if n not in APART}
    made = _fields(hints, told)
    args = Arguments(model=ONE, chat_template_kwargs=None, job=Job(tenant=whose), **made)
    return server.CompletionRequest(kind, "", [], None, None), args


def of_prompt(found: tuple) -> list:
    """Return what mlx-lm's `_tokenize` returns: tokens, segments, their types, and
    the state a reply begins in (and in 0.32 None)."""
    prompt, segments, types, state, *rest = found
    return [prompt, [len(one) for one in segments], types, state, rest]


def to_prompt(told: Any) -> tuple:
    """The same. Raises MachineError."""
    if len(checked(list, told)) != 5:
        raise _wrong("a prompt of other parts")
    prompt, lengths, types, state, rest = told
    sizes = checked(list[int], lengths)
    if sum(sizes) != len(checked(list[int], prompt)) or len(sizes) != len(checked(list, types)):
        raise _wrong("segments that are not the prompt")
    segments, start = [], 0
    for length in lengths:
        segments.append(prompt[start : start + length])
        start += length
    return (
        prompt,
        segments,
        checked(list[str], types),
        checked(str, state),
        *checked(list[None], rest),
    )


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
