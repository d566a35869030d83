"""Parse tool calls from a model's output.

Some of mlx-lm's parsers guess, or skip text that they cannot parse; small models write almost valid calls. Here a call
counts only if it can be parsed in exactly one way; otherwise it stays text.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any
from uuid import uuid4

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


def parts_of(parse: Any, text: str, tools: list | None, is_closed: bool) -> list[tuple]:
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
