"""Fields of requests: read from JSON once, each with its type, or refused in one line that names it."""

from __future__ import annotations

import json
from difflib import get_close_matches
from math import isfinite
from typing import Any

from mlxkv.serve.refusals import Refused

DEPTH = 64  # lists and objects inside one another
_KINDS = {str: "a text", list: "a list", dict: "an object", bool: "true or false"}
_NOTHING = object()
# Fields of other servers and of newer clients, which change nothing here, though their names are close to ours.
LOOKALIKES = {"min_tokens", "mode", "models", "repeat_penalty", "top_a"}


def bad(path: str, reason: str, got: object = _NOTHING) -> Refused:
    """A field whose value cannot be taken."""
    if got is not _NOTHING:
        shown = json.dumps(got, default=str)
        reason += f"; got {shown if len(shown) <= 80 else shown[:77] + '...'}"
    return Refused(400, f"[{path}] {reason}"[:300], "invalid_value")


def document(raw: bytes) -> dict:
    """The JSON object in a body, of bounded depth. Raises Refused."""
    reason = None
    try:
        body = json.loads(
            raw.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite_float
        )
        if isinstance(body, list | dict) and not shallow(body):
            raise RecursionError
        json.dumps(body, ensure_ascii=False).encode()  # raises at half of a surrogate pair
    except UnicodeError:
        reason = "not UTF-8, or text that is not Unicode"
    except RecursionError:
        reason = f"nested too deeply; at most {DEPTH} levels"
    except ValueError as error:
        reason = f"not JSON: {error}"[:180]
    if reason is not None:
        raise Refused(400, f"[body] {reason}", "invalid_json")
    if not isinstance(body, dict):
        raise bad("body", "must be a JSON object", body)
    return body


def shallow(value: object, depth: int = DEPTH) -> bool:
    """Return whether the lists and objects of a list or object are nested at most `depth` deep."""
    inside = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(
        shallow(one, depth - 1) for one in inside if isinstance(one, list | dict)
    )


def _no_constant(name: str):
    raise ValueError(f"{name} is not JSON")


def _finite_float(text: str) -> float:
    if isfinite(number := float(text)):
        return number
    raise ValueError(f"a number beyond all limits; got {text[:20]}")


def mistyped(body: dict, taken: tuple[str, ...]) -> None:
    """Refuse a name that is almost one of ours. Others are dropped: clients send new ones with every version, and
    those of other servers. Raises Refused."""
    for name in body.keys() - LOOKALIKES - {*taken}:
        if close := get_close_matches(name[:40], taken, 1, cutoff=0.8):
            shown = json.dumps(name[:60])[1:-1]  # in one line
            reason = f"[{shown}] no such field; did you mean {close[0]}?"
            raise Refused(400, reason, "unknown_parameter")


def field(path: str, body: dict, name: str, kind: type, default: Any) -> Any:
    """A field that may be missing or null. path: of the object, "" for the request. Raises Refused."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise bad(f"{path}.{name}" if path else name, f"must be {_KINDS[kind]}", value)
    return value


def objects(path: str, values: Any) -> list[tuple[str, dict]]:
    """The objects of a list, each with its place. Raises Refused."""
    if not isinstance(values, list):
        raise bad(path, "must be a list", values)
    for i, value in enumerate(values):
        if not isinstance(value, dict):
            raise bad(f"{path}.{i}", "must be an object", value)
    return [(f"{path}.{i}", value) for i, value in enumerate(values)]


def named(path: str, body: dict, name: str) -> str:
    """A text that must be there and not empty. Raises Refused."""
    value = field(path, body, name, str, "")
    if not value:
        raise bad(f"{path}.{name}", "must be a text that is not empty", body.get(name))
    return value


def call(path: str, id: str, name: str, arguments: object) -> dict:
    """A call of a tool in OpenAI's form, with its arguments as JSON text. Raises Refused."""
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
        text = json.dumps(read, allow_nan=False)
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict) or not shallow(read):
        raise bad(f"{path}.arguments", "must be a JSON object", arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def joined(messages: list[dict]) -> list[dict]:
    """Messages as chat templates take them: one of the system, and first; no two of a user in a row.

    What the system says later on becomes a user's: most templates raise at any other place."""
    out: list[dict] = []
    for message in messages:
        early = all(before["role"] == "system" for before in out)
        role = "user" if message["role"] == "system" and not early else message["role"]
        if role in ("system", "user") and out and out[-1]["role"] == role:
            out[-1] = out[-1] | {"content": f"{out[-1]['content']}\n\n{message['content']}"}
        else:
            out.append(message | {"role": role})
    return out
