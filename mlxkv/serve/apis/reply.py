"""Replies: split the model's output into thinking, text and tool calls, and format them for an API."""

from __future__ import annotations

import ast
import json
import logging
import re
import warnings
from abc import ABC, abstractmethod
from typing import Any
from uuid import uuid4

from mlx_lm.generate import TextStateMachine

from mlxkv.serve.refusals import Refused
from mlxkv.serve.request import Request, Start, Token

KINDS = {"normal": "text", "reasoning": "thinking"}  # by mlx-lm's state names


class Markup:
    """Strips thinking and tool-call marks from a streamed text.

    machine: mlx-lm's state machine, which knows the marks. state: initial state. parse: mlx-lm's tool-call parser, or
    None. tools: the request's tools. marks: opening and closing marks of calls.
    """

    def __init__(
        self,
        machine: TextStateMachine,
        state: str,
        parse: Any,
        tools: list | None,
        marks: tuple[str, str],
    ):
        self._state, self._parse, self._tools = machine.make_state(state), parse, tools
        self._marks = marks
        self._call: str | None = "" if state == "tool" else None

    def feed(self, text: str, last: bool = False) -> list[tuple]:
        """Return parts: ("text" or "thinking", text) and ("call", id, name, arguments as JSON text). A call that
        cannot be parsed stays text, unchanged."""
        self._state, segments = TextStateMachine.split(self._state, text)
        if last:
            self._state, tail, state = TextStateMachine.flush(self._state)
            segments.append((state, tail))
        parts: list[tuple] = []
        for state, text in segments:
            if state == "tool":
                self._call = (self._call or "") + text
                continue
            parts += self._close(True)
            if text and state in KINDS:
                parts.append((KINDS[state], text))
        return parts + (self._close(False) if last else [])

    def _close(self, is_closed: bool) -> list[tuple]:
        text, self._call = self._call, None
        if text is None:
            return []
        try:
            return call_parts(self._parse, text, self._tools, is_closed)
        except Exception as error:  # parsers raise anything
            logging.warning(f"a tool call could not be read, it is text: {str(error)[:80]!r}")
        start, end = self._marks
        return [("text", start + text + (end if is_closed else ""))]


class Reply(ABC):
    """The reply to one request, in the format of an API.

    streams: whether parts are sent as they are generated; else `document()` is the reply. model: its name in replies.
    markup: parses the model's output.
    prompt: `Start` of the request; set once the reply `has_begun`. count: tokens of the reply. kv: content of the
    `kv` field. reason: "stop", "length" or "tool_calls". stop_word: the one that ended the reply, or None.

    The server calls `begin`, `wait`, `take` and `close`, and sends the bytes returned by `flush`.
    """

    prompt: Start

    def __init__(self, request: Request, model: str, markup: Markup):
        self.request, self.streams, self.model = request, request.stream, model
        self._markup = markup
        self.count, self.has_begun = 0, False
        self.kv: dict | None = None
        self.reason, self.stop_word = "stop", None
        self._has_calls, self._buffer = False, b""

    def begin(self, prompt: Start) -> None:
        """Begin the reply: the prefill has started."""
        self.prompt, self.has_begun = prompt, True

    def wait(self, done: int, total: int) -> None:
        """Report prefill progress: `done` of `total` prompt tokens."""
        self._buffer += b": keepalive %d/%d\n\n" % (done, total)

    def take(self, token: Token) -> None:
        """Add a generated token."""
        self.count += 1
        parts = self._markup.feed(token.text, token.reason is not None)
        self._has_calls = self._has_calls or any(part[0] == "call" for part in parts)
        if token.reason is not None:
            ends_with_calls = token.reason == "stop" and self._has_calls
            self.reason = "tool_calls" if ends_with_calls else token.reason
        self.add_parts(parts, token)

    def close(self, kv: dict, stop_word: str | None) -> None:
        """End the reply, after its last token."""
        self.kv, self.stop_word = kv, stop_word if self.reason == "stop" else None

    @abstractmethod
    def add_parts(self, parts: list[tuple], token: Token) -> None:
        """Add the parts of the text that `token` completes."""

    @abstractmethod
    def document(self) -> dict:
        """Return the whole reply."""

    @abstractmethod
    def error_event(self, refused: Refused) -> bytes:
        """Return the error event for a stream that has started."""

    def event(self, document: dict, name: str = "") -> None:
        """Send a server-sent event."""
        if self.streams:
            self._buffer += event(document, name)

    def flush(self) -> bytes:
        """Return the pending bytes of the stream."""
        out, self._buffer = self._buffer, b""
        return out


class Blocks(Reply):
    """A reply in blocks of text, thinking and tool calls. Blank lines between blocks are dropped.

    parts: the reply so far: ["text" or "thinking", text], or ["call", id, name, arguments as JSON text].
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.parts: list[list[str]] = []
        self._blank = ""

    @abstractmethod
    def add_text(self, kind: str, text: str, begins: bool) -> None:
        """Add text. begins: whether it starts a new part instead of extending the last one."""

    @abstractmethod
    def add_call(self, id: str, name: str, arguments: str) -> None:
        """Add a tool call."""

    @abstractmethod
    def end_part(self, kind: str, text: str, is_last: bool) -> None:
        """End a part. text: its text, or the id of a call."""

    def add_parts(self, parts: list[tuple], token: Token) -> None:
        for kind, *values in parts:
            if kind == "call":
                self._blank = ""
                self._begin_part(kind, *values)
                self.add_call(*values)
            else:
                self._extend(kind, *values)

    def _extend(self, kind: str, text: str, blank: bool = False) -> None:
        begins = not self.parts or self.parts[-1][0] != kind
        if begins:
            text, self._blank = self._blank + text, ""
            if not text.strip() and not blank:
                self._blank = text
                return
            self._begin_part(kind, "")
        if text:
            self.parts[-1][1] += text
            self.add_text(kind, text, begins)

    def close(self, kv: dict, stop_word: str | None) -> None:
        super().close(kv, stop_word)
        if self._blank and not self.parts:  # keep a reply of blanks alone
            self._extend("text", "", blank=True)
        self._end_part(is_last=True)

    def _begin_part(self, *part: str) -> None:
        self._end_part()
        self.parts.append([*part])

    def _end_part(self, is_last: bool = False) -> None:
        if self.parts:
            kind, text, *_ = self.parts[-1]
            self.end_part(kind, text, is_last)


def event(document: dict, name: str = "") -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(document)}\n\n".encode()


# -- tool calls. Some of mlx-lm's parsers guess, or skip text that they cannot parse; small models write almost valid
# calls. Here a call counts only if it can be parsed in exactly one way; otherwise it stays text.

STRING = r'"(?:[^"\\]|\\.)*"'
BRACES = re.compile(rf"{STRING}|([{{}}\[\]])", re.DOTALL)
LAST_COMMA = re.compile(rf"({STRING})|,(?=\s*[}}\]])", re.DOTALL)
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
SURPLUS = re.compile(r"[\s}\]]*")  # allowed after a complete value
ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
# Escapes in JSON and in other languages: the model may mean either.
ESCAPES = {*"\\/bfnrt'\r\n0123456789"}
NAME = r"[\w.:/@-]+"
OPEN, END = "<function=", "</function>"  # Qwen3-Coder's calls
# Opening and closing marks of calls and arguments, by mlx-lm's parser.
MARKS = {
    "qwen3_coder": (f"{OPEN}|{END}", "<parameter=|</parameter>"),
    "minimax_m2": ("<invoke name=|</invoke>", "<parameter name=|</parameter>"),
    "minicpm5": (r"<function\b", r"<param\b|</param>"),
    "muse_spark": (r"</?atem:invoke\b", r"</?atem:parameter\b"),
    "kimi_k2": (r"<\|tool_call_(?:begin|end)\|>", None),
    "kimi_k3": (r"<\|(?:open|close)\|>call\b", r"<\|(?:open|close)\|>argument\b"),
    "glm47": (None, "<arg_key>|</arg_value>"),
    "longcat": (None, "<longcat_arg_key>|</longcat_arg_value>"),
}
# Parsers that accept a truncated call as complete.
NEEDS_END = ("glm47", "longcat", "minicpm5")


def call_parts(parse: Any, text: str, tools: list | None, is_closed: bool) -> list[tuple]:
    """Parse the text between tool-call marks into ("call", id, name, arguments as JSON text), followed by
    ("text", words) for any trailing text.

    parse: mlx-lm's parser. is_closed: whether the closing mark was read. Raises any exception if there is no call, or
    if it is ambiguous.
    """
    form = parse.__module__.rpartition(".")[2]
    if form in NEEDS_END and not is_closed:
        raise ValueError("the call has no end")
    if form == "qwen3_coder" and is_closed and text.count(OPEN) == text.count(END) + 1:
        text = text.rstrip() + END
    tools = [tool | {"function": {"parameters": {}} | tool["function"]} for tool in tools or []]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes that Python lacks
        found = READERS.get(form, _parsed)(parse, text, tools, is_closed)
    found = [one for each in found for one in (each if isinstance(each, list) else [each])]
    parts = [part if isinstance(part, tuple) else _call(part, tools) for part in found]
    _check_marks(form, text, [part for part in parts if part[0] == "call"])
    return parts


def _check_marks(form: str, text: str, calls: list[tuple]) -> None:
    """Raise ValueError if the text has more marks than parsed calls: some would be lost."""
    if not calls:
        raise ValueError("no call")
    counts = len(calls), sum(len(json.loads(call[3])) for call in calls)
    for marks, count in zip(MARKS.get(form, ()), counts, strict=False):
        if marks and len(re.findall(marks, text)) not in (0, 2 * count):
            raise ValueError("marks that do not belong together")


def _call(call: Any, tools: list) -> tuple[str, str, str, str]:
    """Return the "call" part for an object with a name and arguments."""
    name = call.get("name") if isinstance(call, dict) else None
    if not (isinstance(name, str) and name) or {"arguments", "parameters"} <= call.keys():
        raise ValueError("a call needs a name, and arguments once")
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str) and arguments.strip():
        (arguments,) = _values(arguments, False)
    elif (arguments is None or isinstance(arguments, str)) and _needs_none(call, tools):
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("arguments are an object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return "call", str(call.get("id") or uuid4()), name, text


def _needs_none(call: dict, tools: list) -> bool:
    """Return whether a call without arguments is complete."""
    functions = [tool["function"] for tool in tools if tool["function"]["name"] == call["name"]]
    is_bare = call.keys() <= {"id", "type", "name", "arguments", "parameters"}
    return is_bare and bool(functions) and not (functions[0]["parameters"] or {}).get("required")


# -- JSON


def _values(text: str, is_closed: bool) -> list:
    """Parse a sequence of JSON values. Raises ValueError.

    Accepts line breaks in strings and surplus closing brackets. Repairs escapes unknown to JSON, trailing commas,
    missing braces at the end of a closed call, and Python's quotes.
    """
    plain = text = text.strip()
    mends = _with_escapes, _without_last_commas, *((_with_braces,) if is_closed else ())
    for mend in (None, *mends):
        text = mend(text) if mend else text
        try:
            return _decoded(text)
        except ValueError:
            continue
    return _literal(plain)


def _decoded(text: str) -> list:
    decoder, out, at = json.JSONDecoder(strict=False), [], 0
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        out.append(value)
        if surplus := SURPLUS.match(text, at):
            at = surplus.end()
    return out


def _with_escapes(text: str) -> str:
    """Double backslashes that start no JSON escape, unless one may be an escape in some language: `C:\\new`."""
    escapes = set(ESCAPE.findall(text))
    if escapes & ESCAPES or any(len(each) > 1 for each in escapes):
        return text
    return re.sub(r'\\(?!")', r"\\\\", text)


def _without_last_commas(text: str) -> str:
    return LAST_COMMA.sub(lambda match: match[1] or "", text)


def _with_braces(text: str) -> str:
    """Append missing closing braces, unless the arguments contain nested objects."""
    braces = "".join(BRACES.findall(text))
    count = braces.count("{")
    return text + "}" * (count - braces.count("}")) if count <= 2 and "[" not in braces else text


def _literal(text: str) -> list:
    """Parse a Python literal without escaped or adjacent strings."""
    if "\\" in text or re.search(r"''\s*''", QUOTED.sub("''", text)):
        raise ValueError("not JSON")
    value = ast.literal_eval(text)
    if not isinstance(value, dict | list):
        raise ValueError("not an object")
    return [value]


# -- other forms


def _parsed(parse: Any, text: str, tools: list, is_closed: bool) -> list:
    return [parse(text, tools)]


def _json(parse: Any, text: str, tools: list, is_closed: bool) -> list:
    return _values(text, is_closed)


def _mistral(parse: Any, text: str, tools: list, is_closed: bool) -> list:
    """Parse a JSON list, or a name, an optional id and arguments; text may follow, as there is no closing mark."""
    head = re.compile(
        rf"\s*(?:\[TOOL_CALLS\])?\s*({NAME})\s*(?:\[CALL_ID\]\s*(\w+)\s*)?\[ARGS\]\s*"
    )
    decoder, out, at = json.JSONDecoder(strict=False), [], 0
    while match := head.match(text, at):
        arguments, at = decoder.raw_decode(text, match.end())
        out.append({"name": match[1], "id": match[2], "arguments": arguments})
    if not out:
        return _values(text, is_closed)
    if "[ARGS]" in text[at:]:
        raise ValueError("a call in pieces")
    return [*out, ("text", text[at:])] if text[at:].strip() else out


def _kimi(parse: Any, text: str, tools: list, is_closed: bool) -> list:
    """Parse calls with an id that contains the name, and JSON arguments."""
    out = []
    for call in re.findall(r"<\|tool_call_begin\|>(.*?)<\|tool_call_end\|>", text, re.DOTALL) or [
        text
    ]:
        head, _, arguments = call.partition("<|tool_call_argument_begin|>")
        match = re.fullmatch(r"(?:functions\.)?(.+):\d+", head.strip())
        if match is None:
            raise ValueError("a call needs an id")
        out.append({"id": match[0], "name": match[1], "arguments": arguments})
    return out


def _pairs(parse: Any, text: str, tools: list, is_closed: bool) -> list:
    """Parse a name followed by key-value pairs, or JSON with an optional name before it."""
    head = re.match(rf"\s*({NAME})\s*", text)
    if head is None:
        return _values(text, is_closed)
    if "arg_key>" not in text:
        return [{"name": head[1], "arguments": text[head.end() :]}]
    call = parse(text, tools)
    if call["name"] != head[1]:
        raise ValueError("words in front of the arguments")
    return [call]


def _coder(parse: Any, text: str, tools: list, is_closed: bool) -> list:
    """Parse functions; a value that does not match its parameter's type stays as the model wrote it."""
    out = []
    for function in re.findall(f"{OPEN}.*?{END}", text, re.DOTALL):
        call = parse(function, None)
        for key, value in call["arguments"].items():
            if value is not None:
                call["arguments"][key] = _typed(parse, call["name"], key, value, tools)
        out.append(call)
    return out


def _typed(parse: Any, name: str, key: str, text: str, tools: list) -> Any:
    function = f"{OPEN}{name}>\n<parameter={key}>\n{text}\n</parameter>\n{END}"
    try:
        value = parse(function, tools)["arguments"][key]
        json.dumps(value, allow_nan=False)
    except Exception:  # raised by Python's number and literal parsers
        return text
    if value is False and text.strip().lower() != "false":  # mlx-lm's fallback
        return text
    if isinstance(value, int) and re.fullmatch(r"[+-]?\d+", text.strip()):
        return int(text)  # the parser goes through float, which rounds
    return value


def _python(parse: Any, text: str, tools: list, is_closed: bool) -> list:
    """Parse Python calls with literal keyword arguments; strings may contain line breaks."""
    text = text.strip()
    if text.startswith(("{", "[{")):
        return _values(text, is_closed)
    try:
        body = ast.parse(text, mode="eval").body
    except SyntaxError:
        text = text.replace("\n", "\\n")
        body = ast.parse(text, mode="eval").body
    if not isinstance(body, ast.List | ast.Tuple | ast.Set):
        raise ValueError("no list")
    calls = [call for call in body.elts if isinstance(call, ast.Call) and not call.args]
    if len(calls) < len(body.elts):
        raise ValueError("values without a name")
    plain = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.UnaryOp, ast.USub, ast.Load)
    for word in [word for call in calls for word in call.keywords]:
        for node in ast.walk(word.value):
            is_word = isinstance(node, ast.Name) and node.id in ("true", "false", "null")
            if not (is_word or isinstance(node, plain)):
                raise ValueError("not a literal")
    return _parsed(parse, text, tools, is_closed)


def _gemma(parse: Any, text: str, tools: list, is_closed: bool) -> list:
    """Parse calls written as `call:name{...}`: the braces must parse completely, or the call is rejected."""
    found = parse(text, tools)
    count = len(found) if isinstance(found, list) else 1
    bare = re.sub(r'<\|"\|>.*?<\|"\|>|<escape>.*?<escape>', "", text, flags=re.DOTALL)
    is_nested = parse.__module__.endswith("gemma4")
    if bare.count("call:") != count or bare.count("{") != bare.count("}"):
        raise ValueError("calls in pieces")
    if not is_nested and bare.count("{") != 1:
        raise ValueError("objects in arguments")
    return [found]


READERS = {
    "json_tools": _json,
    "mistral": _mistral,
    "glm47": _pairs,
    "longcat": _pairs,
    "kimi_k2": _kimi,
    "qwen3_coder": _coder,
    "pythonic": _python,
    "gemma4": _gemma,
    "function_gemma": _gemma,
}
