"""Replies that follow a JSON schema: llguidance's grammars, as masks over the logits of each step.

llguidance is an extra: MIT, one wheel for every Python from 3.10 on (macOS arm64, Linux), no dependencies.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import numpy as np

from mlxkv.serve.refusals import Postponed, Refused, bad

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

PACKAGE = "'llguidance>=1.9,<2'"  # not mlxkv[...]: an index may have another mlxkv
# By a file that tools leave in the environments that they make for a program.
INSTALLERS = {
    "uv-receipt.toml": f"uv tool install --with {PACKAGE} . (in a clone)",
    "pipx_metadata.json": f"pipx inject mlxkv {PACKAGE}",
}
LONGEST = 64 << 10  # maximum characters of a schema
# Whitespace between JSON tokens is bounded: models would write spaces forever.
WHITESPACE: JsonCompileOptions = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"\n?[ \t]{0,16}",
}
ANY_OBJECT = {"type": "object"}


@lru_cache(1)
def _library():
    """Return llguidance, or None if it is not installed."""
    try:
        import llguidance
        import llguidance.hf
    except ImportError:
        return None
    return llguidance


def _how_to_install() -> str:
    """Return the command that puts llguidance into the environment of this process."""
    for file, command in INSTALLERS.items():
        if (Path(sys.prefix) / file).exists():
            return command
    return f"pip install {PACKAGE}"


def of_schema(path: str, schema: object, compiles: bool = True) -> str:
    """Return llguidance's grammar for a JSON schema. path: the field, for errors. compiles: whether to compile it here.
    Raises Refused, and Postponed."""
    library = _library()
    if library is None:
        reason = f"needs llguidance, which this server does not have; {_how_to_install()}"
        raise Refused(400, f"[{path}] {reason}", "not_installed")
    if not isinstance(schema, dict):
        raise bad(path, "must be a JSON schema, an object", schema)
    text = json.dumps(schema)
    if len(text) > LONGEST:
        raise bad(path, f"a schema of more than {LONGEST} characters")
    # This extension can change llguidance's parsing options beyond JSON schema.
    if "x-guidance" in schema:
        raise bad(path, "x-guidance is not JSON schema")
    if not compiles:
        raise Postponed
    grammar = library.LLMatcher.grammar_from_json_schema(text, overrides=WHITESPACE)
    wrong, words = library.LLMatcher.validate_grammar_with_warnings(grammar)
    if wrong:
        raise bad(path, f"not a schema that can be followed: {' '.join(words)}")
    return grammar


@dataclass(frozen=True)
class Calls:
    """Grammar of the marks around a JSON tool call, {"name": ..., "arguments": {...}}."""

    start: str
    end: str


def calls_of(tokenizer: Any) -> Calls | None:
    """Return the model's tool-call marks; None if it has no tool calls or they are not JSON."""
    parser = getattr(tokenizer, "tool_parser", None)
    if parser is None or not parser.__module__.endswith(".json_tools"):
        return None
    marks = [
        (tokenizer.tool_call_start_tokens, tokenizer.tool_call_start),
        (tokenizer.tool_call_end_tokens, tokenizer.tool_call_end),
    ]
    # llguidance matches a single-token mark only by its id; a mark of several tokens is plain text
    return Calls(*(f"<[{ids[0]}]>" if len(ids) == 1 else json.dumps(text) for ids, text in marks))


def of_call(
    name: str | None, tools: list[dict] | None, calls: Calls | None, compiles: bool = True
) -> str:
    """Return the grammar for one tool call. name: the tool's, None for any tool. Raises what `of_schema` raises."""
    choice = "required" if name is None else name
    functions = [tool["function"] for tool in tools or []]
    functions = [each for each in functions if name is None or each.get("name") == name]
    if not functions:
        raise bad("tool_choice", "names a tool that is not among the request's tools", choice)
    if calls is None:
        reason = "this model's tool calls are not JSON in marks; choose auto"
        raise bad("tool_choice", reason, choice)
    definitions: dict[str, Any] = {}
    schema = {"anyOf": [_call_schema(each, definitions) for each in functions]} | definitions
    of_schema("tools", schema, compiles)  # raises a one-line error for an unsupported schema
    body = json.dumps(schema | {"x-guidance": WHITESPACE})
    text = f'start: {calls.start} line body line {calls.end}\nline: "\\n"?\nbody: %json {body}'
    library = _library()
    assert library is not None  # otherwise `of_schema` has raised
    return library.LLMatcher.grammar_from_lark(text)


def _call_schema(function: dict, definitions: dict[str, Any]) -> dict:
    """Return the schema of a call. Definitions in its parameters move to `definitions`, for references to resolve."""
    parameters = function.get("parameters")
    parameters = dict(parameters) if isinstance(parameters, dict) else {}
    if (kind := parameters.get("type", "object")) not in ("object", ["object"]):
        raise bad("tools", "parameters are an object", kind)
    for key in ("$defs", "definitions"):
        schemas, known = parameters.pop(key, None) or {}, definitions.setdefault(key, {})
        if not isinstance(schemas, dict):
            raise bad("tools", f"{key} of a tool must be an object", schemas)
        if any(known.get(name, schema) != schema for name, schema in schemas.items()):
            raise bad("tools", f"two tools define {key} of one name")
        known.update(schemas)
    return {
        "type": "object",
        "properties": {
            "name": {"const": function.get("name")},
            "arguments": {"type": "object"} | parameters,
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


class Grammars:
    """Builds constraints for one tokenizer. vocabulary: columns of the logits."""

    def __init__(self, tokenizer: Any, vocabulary: int):
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._words: Any = None

    def processor(self, grammar: str, thinks: bool) -> Constraint:
        """Return a logits processor for one reply. thinks: whether it begins with unconstrained thinking."""
        free = tuple(self._tokenizer.think_end_tokens or ()) if thinks else ()
        return Constraint(self._matcher(grammar), self._words.eos_tokens, free)

    def try_out(self, grammar: str) -> None:
        """Compile a grammar and its first mask, which takes minutes for some. Raises Refused."""
        matcher = self._matcher(grammar)
        matcher.compute_bitmask()
        if matcher.is_error():
            reason = "[response_format] a schema that no reply can follow, or one of tools"
            raise Refused(400, reason, "invalid_value")

    def _matcher(self, grammar: str) -> Any:
        library = _library()
        assert library is not None  # grammars exist only with llguidance
        if self._words is None:  # lazy: about 100 ms for 150,000 tokens
            plain = getattr(self._tokenizer, "_tokenizer", self._tokenizer)
            ends = sorted(self._tokenizer.eos_token_ids)
            self._words = library.hf.from_tokenizer(plain, self._vocabulary, ends)
        return library.LLMatcher(self._words, grammar, log_level=0)


class Constraint:
    """A logits processor of mlx-lm: (tokens, logits [1, V]) -> logits, which sets tokens forbidden by the
    grammar to -inf. Called once per step, in order, to follow the tokens of the reply.

    matcher: llguidance's, in its initial state. ends: end-of-turn tokens, the only ones allowed once the grammar
    is complete. after: tokens after which the grammar begins, () for immediately.

    error: why the reply ended before the grammar was complete, else None.
    """

    def __init__(self, matcher: Any, ends: list[int], after: tuple[int, ...] = ()):
        self._matcher, self._ends, self._after = matcher, ends, after
        self._last: list[int] = []
        self._begun = False
        self.error: Refused | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self._begun:  # the first call follows the prompt
            self._take(cast(int, tokens[-1].item()))
        self._begun = True
        if self._after:
            return logits
        columns = logits.shape[-1]
        allowed = np.zeros(columns, bool)
        if not self._matcher.is_stopped():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            bits = np.unpackbits(bits, bitorder="little")[:columns].astype(bool)
            allowed[: len(bits)] = bits
        if not allowed.any():  # complete, or beyond llguidance's limits
            if self._matcher.is_error():
                reason = "[response_format] a schema, or one of tools, that grew too complex in the reply"
                error = self._matcher.get_error().partition("\n")[0]
                self.error = Refused(400, f"{reason}: {error}"[:300], "too_complex")
            allowed[self._ends] = True
        return mx.where(mx.array(allowed), logits, mx.array(-mx.inf, logits.dtype))

    def _take(self, token: int) -> None:
        if self._after:
            self._last = [*self._last, token][-len(self._after) :]
            if tuple(self._last) == self._after:
                self._after = ()
        elif not self._matcher.is_stopped() and token not in self._ends:
            self._matcher.consume_token(token)
