"""Render chat templates in a process of their own, with bounded time and memory.

A template is a program shipped with the model; jinja's sandbox denies it files. One process serves all
models; it starts when the first one is loaded, and renders with transformers' own function. It uses 60 MB and adds
about .7 ms per text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from mlxkv.catalog.bounded import Excess, Process
from mlxkv.errors import UserError

SECONDS = 1.0  # of processor time for one text
MEMORY = 1 << 30  # bytes for one text, beyond the idle process
RENDER = "render_jinja_template"  # transformers' function: conversations and a template -> texts
RENDERER = Process(__name__)


def bound(tokenizer: Any, path: Path) -> None:
    """Make `tokenizer.apply_chat_template` of transformers render by `RENDERER`, and try it. Skip a
    tokenizer whose class in transformers has its own renderer.

    path: the model's folder. Raises UserError for a template that exceeds the limits on one word.
    """

    def bounded(original: Callable) -> Callable:
        def render(**arguments) -> tuple[list[str], list]:
            try:
                question = json.dumps(arguments).encode()
            except (TypeError, ValueError):  # functions as tools: from a program, not a request
                return original(**arguments)
            return _rendered(question)

        return render

    if not render_by(tokenizer, bounded):
        return
    if not getattr(tokenizer, "chat_template", None):
        return
    try:
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
        )
    except Excess as error:
        raise UserError(f"[load] {error}; got {path}; choose another model") from None
    except Exception:
        return  # reported on use: some templates refuse inputs that others need


def render_by(tokenizer: Any, wrap: Callable[[Callable], Callable]) -> bool:
    """Make `tokenizer.apply_chat_template` render by wrap(`render_jinja_template`). Returns False, with the tokenizer
    unchanged, if it has its own renderer."""
    call = getattr(type(tokenizer), "apply_chat_template", None)
    if not isinstance(call, FunctionType) or RENDER not in call.__code__.co_names:
        return False
    # The same code with that one global replaced: other tokenizers are not affected.
    names = {**call.__globals__, RENDER: wrap(call.__globals__[RENDER])}
    method = FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    method.__kwdefaults__ = call.__kwdefaults__
    tokenizer.apply_chat_template = MethodType(method, tokenizer)
    return True


def _rendered(question: bytes) -> tuple[list[str], list]:
    """Call `render_jinja_template` with arguments in JSON. Raises Excess, ValueError with the template's message."""
    try:
        reply = json.loads(RENDERER.ask(question, SECONDS, MEMORY))
    except Excess as error:
        raise Excess(f"the chat template {error} for one text") from None
    if "error" in reply:
        raise ValueError(reply["error"])
    return reply["texts"], reply["places"]


def prepare() -> Callable[[bytes], bytes]:
    """Return the process's answering function: JSON arguments of `render_jinja_template` -> texts and places."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def answer(question: bytes) -> bytes:
        try:
            texts, places = render_jinja_template(**json.loads(question))
            reply = {"texts": texts, "places": places}
        except MemoryError:
            raise
        except Exception as error:  # from jinja, or raised by the template
            reply = {"error": str(error) or type(error).__name__}
        return json.dumps(reply).encode()

    return answer
