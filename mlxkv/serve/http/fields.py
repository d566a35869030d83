"""Fields of requests: read from JSON once, each with its type, or refused in one line that names it."""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import Any

from mlxkv.serve.refusals import Refused

DEPTH = 64  # lists and objects inside one another
VALUES = 100_000  # of a body: a chat of a million tokens has fewer
FIELDS = 256  # of a request
FINITE = 1.7976931348623157e308  # the largest number of 64 bits
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
    """The JSON object in a body, with numbers and depth that JSON's other readers have, too. Raises Refused."""
    try:
        body = json.loads(raw.decode("utf-8"))
        json.dumps(body, ensure_ascii=False).encode()  # raises at half of a surrogate pair
    except UnicodeError:
        reason = "not UTF-8, or text that is not Unicode"
    except RecursionError:
        reason = f"nested too deeply; at most {DEPTH} levels"
    except ValueError as error:
        reason = f"not JSON: {error}"[:180]
    else:
        if not isinstance(body, dict):
            raise bad("body", "must be a JSON object", body)
        if len(body) > FIELDS:
            raise bad("body", f"at most {FIELDS} fields", len(body))
        check_values("body", body)
        return body
    raise Refused(400, f"[body] {reason}", "invalid_json")


def check_values(path: str, value: dict) -> None:
    """Raise Refused for lists and objects that are nested too deeply or hold too many values, and for numbers that are
    none. path: of the object."""
    values, count = [(path, value, DEPTH)], 0
    while values:
        path, value, depth = values.pop()
        if isinstance(value, list | dict):
            count += len(value)
            if not depth or count > VALUES:
                what = (
                    f"at most {VALUES} values"
                    if depth
                    else f"nested too deeply; at most {DEPTH} levels"
                )
                raise Refused(400, f"[body] {what}", "invalid_json")
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            values += [
                (f"{path[:200]}.{str(name)[:40]}", inner, depth - 1)
                for name, inner in pairs
                if isinstance(inner, list | dict | float | int)
            ]
        elif not abs(value) <= FINITE:
            path = path.removeprefix("body.")
            raise bad(path, f"must be a number from -{FINITE:g} to {FINITE:g}", value)


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


def text_of(path: str, part: dict, kinds: tuple[str, ...] = ("text",)) -> str:
    """The text of a part, whose type is one of `kinds`. Raises Refused."""
    kind = part.get("type", "text")
    if kind not in kinds:
        reason = "no images are taken" if "image" in str(kind) else "only parts with text are"
        raise bad(path, reason, kind)
    name = "refusal" if kind == "refusal" else "text"
    if (text := field(path, part, name, str, None)) is None:
        raise bad(f"{path}.{name}", "must be a text", None)
    return text


def texts_of(path: str, content: object, kinds: tuple[str, ...] = ("text",)) -> list[str]:
    """The texts of a content, which is one or has parts, of these types. Raises Refused."""
    if content is None or isinstance(content, str):
        return [content or ""]
    return [text_of(place, part, kinds) for place, part in objects(path, content)]


def tool(path: str, body: dict, schema: str) -> dict:
    """A tool in OpenAI's form. schema: the name of the field with its parameters. Raises Refused."""
    function = {
        "name": named(path, body, "name"),
        "description": field(path, body, "description", str, ""),
        "parameters": field(path, body, schema, dict, {}),
    }
    return {"type": "function", "function": function}


def call(id: str, name: str, arguments: object) -> dict:
    """A call of a tool in OpenAI's form, with its arguments as text: JSON, unless the model wrote none."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
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
