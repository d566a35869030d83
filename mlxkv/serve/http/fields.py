"""Fields of requests: read from JSON once, each with its type, or refused in one line that names it."""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import Any

from mlxkv.serve.refusals import Refused

DEPTH = 64  # lists and objects inside one another
TOO_DEEP = f"nested too deeply; at most {DEPTH} levels"
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
        body = json.loads(raw.decode("utf-8"), parse_int=_whole)
        json.dumps(body, ensure_ascii=False).encode()  # raises at half of a surrogate pair
    except UnicodeError:
        reason = "not UTF-8, or text that is not Unicode"
    except RecursionError:
        reason = TOO_DEEP
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


def _whole(digits: str) -> int | float:
    """An integer; beyond what Python reads, or a check takes, infinity."""
    return int(digits) if len(digits) < 400 else float(digits)


def check_values(path: str, value: dict) -> None:
    """Raise Refused for lists and objects that are nested too deeply or hold too many values, and for numbers that are
    none. path: of the object."""
    values, count = [(path, value, DEPTH)], 0
    while values:
        path, value, depth = values.pop()
        if isinstance(value, list | dict):
            count += len(value)
            if not depth or count > VALUES:
                what = f"at most {VALUES} values" if depth else TOO_DEEP
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


def renamed(refused: Refused, names: dict[str, str]) -> Refused:
    """The same under the names that places have in another API. names: by how they begin in OpenAI's chats."""
    place, end, rest = refused.message.partition("]")
    first, dot, inner = place[1:].replace(".json_schema", "").partition(".")
    if first in names:
        refused.message = f"[{names[first]}{dot}{inner.replace('function.', '')}{end}{rest}"
    return refused


def mistyped(body: dict, taken: tuple[str, ...]) -> None:
    """Refuse a name that is almost one of ours. Others are dropped: clients send new ones with every version, and
    those of other servers. Raises Refused."""
    for name in body.keys() - LOOKALIKES - {*taken}:
        if close := get_close_matches(name[:40], taken, 1, cutoff=0.8):
            shown = json.dumps(name[:60])[1:-1]  # in one line
            reason = f"[{shown}] no such field; did you mean {close[0]}?"
            raise Refused(400, reason, "unknown_parameter")


class Fields:
    """The fields of a JSON object, each read with its type. All methods raise Refused, which names the field.

    path: of the object, "" for the request.
    """

    def __init__(self, body: dict, path: str = ""):
        self.body, self.path = body, path

    def place(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def bad(self, name: str, reason: str) -> Refused:
        return bad(self.place(name), reason, self.body.get(name))

    def get(self, name: str, kind: type, default: Any) -> Any:
        """A field that may be missing or null."""
        value = self.body.get(name)
        if value is None:
            return default
        if type(value) is not kind:
            raise self.bad(name, f"must be {_KINDS[kind]}")
        return value

    def text(self, name: str) -> str:
        return self.get(name, str, "")

    def object(self, name: str) -> dict:
        return self.get(name, dict, {})

    def flag(self, name: str) -> bool:
        return self.get(name, bool, False)

    def named(self, name: str) -> str:
        """A text that must be there and not empty."""
        value = self.text(name)
        if not value:
            raise self.bad(name, "must be a text that is not empty")
        return value

    def objects(self, name: str, optional: bool = False) -> list[Fields]:
        """The objects of a list."""
        values = self.body.get(name)
        if optional and not values:
            return []
        if not isinstance(values, list):
            raise self.bad(name, "must be a list")
        for i, value in enumerate(values):
            if not isinstance(value, dict):
                raise bad(self.place(f"{name}.{i}"), "must be an object", value)
        return [Fields(value, self.place(f"{name}.{i}")) for i, value in enumerate(values)]

    def part(self, kinds: tuple[str, ...] = ("text",)) -> str:
        """The text of this object, a part whose type is one of `kinds`."""
        kind = self.body.get("type", "text")
        if kind not in kinds:
            reason = "no images here" if "image" in str(kind) else "only text parts are supported"
            raise bad(self.path, reason, kind)
        name = "refusal" if kind == "refusal" else "text"
        if (text := self.get(name, str, None)) is None:
            raise self.bad(name, "must be a text")
        return text

    def texts(self, name: str, kinds: tuple[str, ...] = ("text",)) -> list[str]:
        """The texts of a content, which is one or has parts, of these types."""
        content = self.body.get(name)
        if content is None or isinstance(content, str):
            return [content or ""]
        return [part.part(kinds) for part in self.objects(name)]

    def tool(self, schema: str) -> dict:
        """This object, a tool, in OpenAI's form. schema: the name of the field with its parameters."""
        function = {
            "name": self.named("name"),
            "description": self.text("description"),
            "parameters": self.object(schema),
        }
        return {"type": "function", "function": function}


def schema_format(wanted: dict) -> dict:
    """OpenAI's response_format for a schema of another API."""
    return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}


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
