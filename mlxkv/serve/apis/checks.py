"""What the readers of other APIs' requests share: fields with a type, or an error that names them."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from mlxkv.serve.http.request import bad, shallow
from mlxkv.serve.refusals import Refused

_KINDS = {str: "a text", list: "a list", dict: "an object", bool: "true or false"}


def field(where: str, body: dict, name: str, kind: type, default: Any) -> Any:
    """A field that may be missing or null. where: of the object, "" for the request. Raises Refused."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise bad(f"{where}.{name}" if where else name, f"must be {_KINDS[kind]}", value)
    return value


def objects(where: str, values: Any) -> list[tuple[str, dict]]:
    """The objects of a list, each with its place. Raises Refused."""
    if not isinstance(values, list):
        raise bad(where, "must be a list", values)
    for i, value in enumerate(values):
        if not isinstance(value, dict):
            raise bad(f"{where}.{i}", "must be an object", value)
    return [(f"{where}.{i}", value) for i, value in enumerate(values)]


def named(where: str, body: dict, name: str) -> str:
    """A text that must be there and not empty. Raises Refused."""
    value = field(where, body, name, str, "")
    if not value:
        raise bad(f"{where}.{name}", "must be a text that is not empty", body.get(name))
    return value


def mistyped(body: dict, taken: tuple[str, ...], known: frozenset[str]) -> None:
    """Refuse a name that is almost one of ours. Other names that are not `known` are dropped: clients of
    these APIs send new ones with every version. Raises Refused."""
    for name in body.keys() - known - set(taken):
        if close := get_close_matches(name[:40], taken, 1, cutoff=0.8):
            raise bad(name[:60], f"no such field; did you mean {close[0]}?", body[name])


def tool(where: str, name: str, description: str, schema: dict) -> dict:
    """A function in OpenAI's form. Raises Refused."""
    if not shallow(schema):
        raise bad(where, "nested too deeply", "...")
    function: dict[str, Any] = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def unsupported(where: str, what: str) -> Refused:
    return Refused(400, f"[{where}] {what}"[:300], "invalid_value")


def joined(messages: list[dict]) -> list[dict]:
    """Messages as chat templates take them: one of the system, and first; no two of a user in a row.

    What the system says later on becomes a user's: most templates raise at any other place."""
    out: list[dict] = []
    for one in messages:
        early = all(before["role"] == "system" for before in out)
        role = "user" if one["role"] == "system" and not early else one["role"]
        if role in ("system", "user") and out and out[-1]["role"] == role:
            out[-1] = out[-1] | {"content": f"{out[-1]['content']}\n\n{one['content']}"}
        else:
            out.append(one | {"role": role})
    return out
