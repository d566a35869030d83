"""Requests and the tool calls that answer them, one line of JSON each. The arguments are words of the
request and, for one tool, a code that a long text gives."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

INTRODUCTION = (
    "You have three tools. Answer each request with one line of JSON and nothing else.\n"
    "save_code: name, code\n"
    "send_note: to, text\n"
    "set_timer: minutes\n\n"
    "{request}"
)
EXAMPLES = 6
TRIES = 50
Codes = Sequence[tuple[str, str]]
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ida", "Jack")
NOTES = (
    "the bread is ready", "the door is open", "the boat is late", "the garden is dry",
    "the cat is home", "the lamp is broken", "the tea is cold", "the box is empty",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """answer: the call as one line of JSON. values: of its arguments, in their order there."""

    request: str
    answer: str
    values: tuple[str, ...]


def _save(rng: Random, codes: Codes) -> Call:
    name, code = rng.choice(codes)
    return _call(f"Save the code of {name}.", "save_code", name=name, code=int(code))


def _send(rng: Random, _: Codes) -> Call:
    to, text = rng.choice(NAMES), rng.choice(NOTES)
    return _call(f'Send {to} the note "{text}".', "send_note", to=to, text=text)


def _time(rng: Random, _: Codes) -> Call:
    minutes = rng.randrange(2, 100)
    return _call(f"Set a timer for {minutes} minutes.", "set_timer", minutes=minutes)


MAKERS = (_save, _send, _time)


def _call(request: str, tool: str, **arguments) -> Call:
    values = tuple(map(str, arguments.values()))
    return Call(request, json.dumps({"tool": tool, "arguments": arguments}), values)


def calls(rng: Random, count: int, codes: Codes) -> list[Call]:
    """Return `count` calls, the tools in turn, all different if possible.

    codes: (name, digits) that the text gives.
    """
    out: list[Call] = []
    while len(out) < count:
        make = MAKERS[len(out) % len(MAKERS)]
        tries = [make(rng, codes) for _ in range(TRIES)]
        out.append(next((call for call in tries if call not in out), tries[0]))
    return out


def parse(text: str) -> dict | None:
    """Return the call in a reply, without a code fence, or None if it is not JSON of this shape."""
    text = re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip())
    try:
        call = json.loads(text)
    except ValueError:
        return None
    fits = isinstance(call, dict) and set(call) == {"tool", "arguments"}
    shapes = fits and isinstance(call["tool"], str) and isinstance(call["arguments"], dict)
    return call if shapes else None
