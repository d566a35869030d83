"""Request bodies: bounded JSON, validated against the type that the API declares. Errors are one line and name the
field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from typing_extensions import Self

from mlxkv.catalog.option_checks import RESERVED
from mlxkv.serve import grammar
from mlxkv.serve.refusals import NOTHING, Refused, bad
from mlxkv.serve.request import DEFAULT_NAMES, ModelInfo, Request, no_model

DEPTH = 64  # nesting of lists and objects
TOO_DEEP = f"nested too deeply; at most {DEPTH} levels"
VALUES = 100_000  # per body: a chat of a million tokens has fewer
FIELDS = 256  # per request
FINITE = 1.7976931348623157e308  # the largest float64
# Fields of other servers and newer clients, ignored although their names are close to ours.
LOOKALIKES = {"min_tokens", "mode", "models", "repeat_penalty", "top_a"}
# Substrings of part types that mark media.
MEDIA = ("image", "audio", "video", "document", "file")
STOPS, STOP_LENGTH = 16, 256
NAME_LENGTH = 512
ENDLESS = -1  # max_tokens=-1, as in llama.cpp: until the context or the memory is full
# Lowest temperature: anything colder is greedy. 16-bit logits are divided by it; log-probabilities of the best
# token, at least about -12, stay finite in float16.
COLDEST = 1e-3
LEAST_TOP_P = 1e-6  # still distinct from 0 in float32 sums near 1: keeps the best token alone


# -- JSON


def document(raw: bytes) -> dict:
    """Parse a body as a JSON object, with numbers and nesting that other JSON parsers accept, too. Raises Refused."""
    try:
        body = json.loads(raw.decode("utf-8"), parse_int=_whole)
        json.dumps(body, ensure_ascii=False).encode()  # raises on a lone surrogate
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
        _check_values(body)
        return body
    raise Refused(400, f"[body] {reason}", "invalid_json")


def _whole(digits: str) -> int | float:
    """Parse an integer; return infinity if it is too large for Python's parser or for the checks."""
    return int(digits) if len(digits) < 400 else float(digits)


def _check_values(body: dict) -> None:
    """Raise Refused if a body is nested too deeply, holds too many values, or has non-finite numbers."""
    values: list[tuple[str, Any, int]] = [("", body, DEPTH)]
    count = 0
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
            raise bad(path[1:], f"must be a number from -{FINITE} to {FINITE}", value)


# -- objects with fields


class Wrong(ValueError):
    """A value rejected by a validator. field: the invalid field of the object, if known. got: value to show."""

    def __init__(self, reason: str, field: str = "", got: object = NOTHING):
        super().__init__(reason)
        self.field, self.got = field, got


class Object(BaseModel):
    """A JSON object with typed fields, without type conversion. Null counts as missing; unknown fields are dropped."""

    model_config = ConfigDict(strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: inner for name, inner in value.items() if inner is not None}

    @classmethod
    def read(cls, body: dict) -> Self:
        """Validate a body. Raises Refused, which names the first invalid field."""
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise _refused(error) from None


NOT_EMPTY = "must be a text that is not empty"
# Pydantic's error types, and the messages that clients read.
REASONS = {
    "string_type": "must be a text",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "missing": "missing",
    "string_too_short": NOT_EMPTY,
    "string_too_long": f"must be a text of at most {NAME_LENGTH} characters",
    "string_pattern_mismatch": "must be letters, digits and _ . : / @ -",
    "too_short": "must be a list that is not empty",
}


def _refused(invalid: ValidationError) -> Refused:
    error = invalid.errors(include_url=False)[0]
    kind, place, got = error["type"], list(error["loc"]), error["input"]
    context = error.get("ctx", {})
    wrong = context.get("error")
    reason = REASONS.get(kind) or str(wrong or error["msg"])
    if kind == "literal_error":
        reason = f"must be {context['expected']}"
    if kind == "missing":
        got = NOTHING
    if isinstance(wrong, Wrong):
        place, got = [*place, *([wrong.field] if wrong.field else [])], wrong.got
    return bad(".".join(map(str, place)) or "body", reason, got)


def between(low: float, high: float) -> AfterValidator:
    """Return a validator for numbers between `low` and `high`."""

    def check(value: float) -> float:
        if not low <= value <= high:
            raise ValueError(f"must be from {low} to {high}")
        return value

    return AfterValidator(check)


def only(*values: Any) -> BeforeValidator:
    """Return a validator for an optional field with these values only."""

    def check(value: Any) -> Any:
        if (type(value), value) in [(type(x), x) for x in values]:
            return value
        raise ValueError(
            f"only {json.dumps(values[0])} is supported" if values else "not supported"
        )

    return BeforeValidator(check)


def _length(value: int) -> int:
    if value != ENDLESS and not 1 <= value <= 1 << 24:
        raise ValueError(f"must be from 1 to {1 << 24}")
    return value


def _stop_words(words: list[str]) -> list[str]:
    if not all(words):
        raise ValueError("must be a string, or a list of strings, none empty")
    if len(words) > STOPS or any(len(word) > STOP_LENGTH for word in words):
        raise ValueError(f"at most {STOPS} strings of {STOP_LENGTH} characters")
    return words


def _template_arguments(values: dict) -> dict:
    plain = str | bool | int | float
    if any(name in RESERVED or not isinstance(x, plain) for name, x in values.items()):
        raise ValueError("must be plain values, of names that are free")
    return values


Named = Annotated[str, Field(min_length=1)]
Label = Annotated[str, Field(max_length=NAME_LENGTH)]
# Markup or special tokens in a tool's name would end its call.
ToolName = Annotated[str, Field(pattern=r"^[\w.:/@-]+$", max_length=NAME_LENGTH)]
Length = Annotated[int, AfterValidator(_length)]
StopWords = Annotated[list[str], AfterValidator(_stop_words)]
TemplateArguments = Annotated[dict[str, Any], AfterValidator(_template_arguments)]


# -- contents of messages


class ContentPart(Object):
    """A content part. Media are replaced by a line of text for text-only models: the part stays in the chat, so
    refusing it would end the chat."""

    texts: ClassVar[tuple[str, ...]] = ("text",)  # types whose text the model reads
    type: str = "text"
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        self.check_part()
        return self

    def check_part(self) -> None:
        """Raise Wrong if neither the part nor a placeholder line can be shown to the model."""
        if self.is_text:
            if self._words() is None:
                raise Wrong("must be a text", "refusal" if self.type == "refusal" else "text", None)
        elif self.medium is None:
            raise Wrong(f"a part must be text, or one of {', '.join(MEDIA)}", got=self.type)

    @property
    def is_text(self) -> bool:
        return self.type in self.texts

    @property
    def medium(self) -> str | None:
        return next((medium for medium in MEDIA if medium in self.type), None)

    def _words(self) -> str | None:
        return self.refusal if self.type == "refusal" else self.text

    def shown(self) -> str:
        """Return the text shown to the model."""
        if self.is_text:
            return self._words() or ""
        return f"[{self.medium}: not shown, this model reads text only]"


def parts_of(kind: Callable[..., ContentPart]) -> BeforeValidator:
    """Return a validator that wraps a plain string in a list of one part. kind: the type of the part."""
    return BeforeValidator(lambda x: [kind(type="text", text=x)] if isinstance(x, str) else x)


Content = Annotated[list[ContentPart], parts_of(ContentPart)]


def text_of(parts: Iterable[ContentPart], between: str = "") -> str:
    """Join parts into one text, separated by `between`; a part that is not shown becomes a line of its own."""
    out: list[str] = []
    is_line = False
    for part in parts:
        was_line, is_line = is_line, not part.is_text
        end = "\n" if was_line or is_line else ""
        out += [between or end, part.shown()] if out else [part.shown()]
    return "".join(out)


def tool_call(id: str, name: str, arguments: object) -> dict:
    """Return a tool call in the chat template's form; arguments are text, JSON unless the model wrote otherwise."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def tool(name: str, description: str, parameters: dict) -> dict:
    """Return a tool in the chat template's form."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


# -- requests


class Choice(NamedTuple):
    """The tool choice. kind: auto, none or required. name: the required tool, or any if empty."""

    kind: str = "auto"
    name: str | None = None


AUTO = Choice()


class Format(NamedTuple):
    """The schema of the reply. path: the field that contains it."""

    path: str
    schema: Any


class Body(Object):
    """Fields common to all APIs."""

    # Fields restricted to their neutral value: a name close to one of them is not taken for a typo.
    fixed: ClassVar[frozenset[str]] = frozenset()

    model: str = ""
    stream: bool = False
    temperature: Annotated[float, between(0, 100)] = 0.0
    top_p: Annotated[float, between(0, 1)] = 1.0
    chat_template_kwargs: TemplateArguments = Field(default_factory=dict)
    cache_salt: Label = ""

    @classmethod
    def read(cls, body: dict) -> Self:
        names = cls.model_fields.keys() - cls.fixed
        # Unknown fields are dropped: new client versions add some, and clients send other servers' fields.
        for name in sorted(body.keys() - LOOKALIKES - cls.model_fields.keys()):
            if body[name] is None:
                continue
            if close := get_close_matches(name[:40], names, 1, cutoff=0.8):
                shown = json.dumps(name[:60])[1:-1]  # on one line
                reason = f"[{shown}] no such field; did you mean {close[0]}?"
                raise Refused(400, reason, "unknown_parameter")
        return super().read(body)

    def request(
        self,
        model_info: ModelInfo,
        max_tokens: int | None,
        *,
        shorten: bool = False,
        tools: list[dict] | None = None,
        choice: Choice = AUTO,
        form: Format | None = None,
        **more: Any,
    ) -> Request:
        """Build the request from these fields. more: further fields of `Request`. Raises Refused."""
        if self.model and self.model not in (model_info.model, *DEFAULT_NAMES):
            raise no_model(self.model[:80], (model_info.model,))
        longest = model_info.longest
        shorten = shorten or max_tokens in (None, ENDLESS)
        max_tokens = longest if max_tokens == ENDLESS else max_tokens
        tools = None if choice.kind == "none" else tools or None
        return Request(
            stream=self.stream,
            max_tokens=min(max_tokens, longest) if max_tokens else model_info.max_tokens,
            shorten=shorten,
            tools=tools,
            grammar=_grammar(choice, tools, form, model_info),
            chat_template_kwargs=self.chat_template_kwargs or None,
            cache_salt=self.cache_salt,
            **self._sampling(model_info),
            **more,
        )

    def _sampling(self, model_info: ModelInfo) -> dict[str, Any]:
        out = asdict(model_info.sampling)
        out |= {name: getattr(self, name) for name in self.model_fields_set & SAMPLING}
        if out["top_k"] >= model_info.vocabulary:
            out["top_k"] = 0  # no limit: mlx-lm's sampler would raise in the shared thread
        if out["temperature"] < COLDEST:
            out["temperature"] = 0.0
        if (out.get("seed") or 0) < 0:
            del out["seed"]  # random seed, as in llama.cpp
        if out["top_p"] > 0:  # 0 turns it off in mlx-lm
            out["top_p"] = max(out["top_p"], LEAST_TOP_P)
        return out


# Sampling fields of `Request`, by their names in the APIs.
SAMPLING = {
    *("temperature", "top_p", "top_k", "min_p", "seed", "xtc_probability", "xtc_threshold"),
    *("repetition_penalty", "repetition_context_size", "presence_penalty"),
    *("presence_context_size", "frequency_penalty", "frequency_context_size"),
}


def _grammar(
    choice: Choice, tools: list[dict] | None, form: Format | None, model_info: ModelInfo
) -> str | None:
    """Return the grammar of the reply: for a format, or for a tool call."""
    if choice.kind != "required":
        return form and grammar.of_schema(form.path, form.schema, model_info.compiles)
    call = grammar.of_call(choice.name, tools, model_info.calls, model_info.compiles)
    if form is not None:
        reason = "a call follows no response_format; leave one of them out"
        raise bad("tool_choice", reason, choice.name or choice.kind)
    return call
