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
# Parts of messages that a model would have to see or hear, by words in the names of their types.
MEDIA = ("image", "audio", "video", "document", "file")
_NOTHING = object()
# Fields of other servers and of newer clients, which change nothing here, though their names are close to ours.
LOOKALIKES = {"min_tokens", "mode", "models", "repeat_penalty", "top_a"}


def bad(path: str, reason: str, got: object = _NOTHING) -> Refused:
    """Return a field whose value cannot be taken."""
    if got is not _NOTHING:
        shown = json.dumps(got, default=str)
        reason += f"; got {shown if len(shown) <= 80 else shown[:77] + '...'}"
    return Refused(400, f"[{path}] {reason}"[:300], "invalid_value")


def document(raw: bytes) -> dict:
    """Return the JSON object in a body, with numbers and depth that JSON's other readers have, too. Raises Refused."""
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
    """Return an integer; beyond what Python reads, or a check takes, infinity."""
    return int(digits) if len(digits) < 400 else float(digits)


def check_values(path: str, value: dict | list | float) -> None:
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
            raise bad(path, f"must be a number from -{FINITE} to {FINITE}", value)


def renamed(refused: Refused, names: dict[str, str]) -> Refused:
    """Return the same under the names that places have in another API. names: by how they begin in OpenAI's chats."""
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
        """Return a field that may be missing or null."""
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
        """Return a text that must be there and not empty."""
        value = self.text(name)
        if not value:
            raise self.bad(name, "must be a text that is not empty")
        return value

    def objects(self, name: str, optional: bool = False) -> list[Fields]:
        """Return the objects of a list."""
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
        """Return the text of this object, a part whose type is one of `kinds`. A line stands for what a model that
        reads text
        alone is not shown: a refusal would end the chat, in which it stays."""
        kind = self.body.get("type", "text")
        if kind == "document" and (text := self._document()) is not None:
            return text
        if kind not in kinds:
            if (line := self.left_out()) is not None:
                return line
            raise bad(self.path, f"a part must be text, or one of {', '.join(MEDIA)}", kind)
        name = "refusal" if kind == "refusal" else "text"
        if (text := self.get(name, str, None)) is None:
            raise self.bad(name, "must be a text")
        return text

    def left_out(self) -> str | None:
        """Return a line that says what this object, a part, would show; None where it is nothing of MEDIA."""
        kind = str(self.body.get("type"))
        medium = next((medium for medium in MEDIA if medium in kind), None)
        return medium and f"[{medium}: not shown, this model reads text only]"

    def _document(self) -> str | None:
        """Return the text of a document of Anthropic's API; None of one that has to be shown."""
        source = Fields(self.object("source"), self.place("source"))
        names = {"text": "data", "content": "content"}  # by the types of sources
        name = names.get(str(source.body.get("type")))
        return name and "\n".join(filter(None, (self.text("title"), source.content(name))))

    def texts(self, name: str, kinds: tuple[str, ...] = ("text",)) -> list[str]:
        """Return the texts of a content, which is one or has parts, of these types."""
        content = self.body.get(name)
        if content is None or isinstance(content, str):
            return [content or ""]
        return [part.part(kinds) for part in self.objects(name)]

    def content(self, name: str, kinds: tuple[str, ...] = ("text",), between: str = "") -> str:
        """Return the same as one text, with `between` its parts; what is left out has a line of its own."""
        if not isinstance(self.body.get(name), list):
            return "".join(self.texts(name, kinds))
        out, is_line = [], False
        for part in self.objects(name):
            was_line, is_line = is_line, part.body.get("type", "text") not in kinds
            end = "\n" if was_line or is_line else ""
            out += [between or end, part.part(kinds)] if out else [part.part(kinds)]
        return "".join(out)

    def tool(self, schema: str) -> dict:
        """Return this object, a tool, in OpenAI's form. schema: the name of the field with its parameters."""
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
    """Return a call of a tool in OpenAI's form, with its arguments as text: JSON, unless the model wrote none."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}
