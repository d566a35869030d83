"""Requests as tokens: the chat template, contents as plain text, starts of replies, and parts worth keeping."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Any, NamedTuple

from mlxkv.models.replies.continuing import continued
from mlxkv.models.replies.thinking import Thinking
from mlxkv.models.turns import Cut, Turns, with_texts
from mlxkv.serve.http.request import Request
from mlxkv.serve.refusals import Refused

TAIL = 11  # tokens at the end of a prompt, in which templates begin thoughts
# A chat for a model without a template, as mlx-lm writes it.
PLAIN = {"system": "ASSISTANT's RULE: ", "user": "USER: ", "assistant": "ASSISTANT: "}


class Prompt(NamedTuple):
    """The tokens of a request.

    segments: the same, cut behind the system's words and before a tail of thinking: whose caches are kept.
    state: in which the reply begins, "normal" or "reasoning".
    """

    tokens: list[int]
    segments: list[list[int]]
    state: str = "normal"


class Prompts:
    """Makes tokens of requests. template: what chat templates are given besides messages."""

    def __init__(self, tokenizer: Any, template: dict):
        self._tokenizer, self._template = tokenizer, template
        self._turns, self._thinking = Turns(tokenizer), Thinking(tokenizer)

    def read(self, request: Request) -> Prompt:
        """The prompt of a request, of any length. Raises Refused where a template fails."""
        try:
            if not request.chat:
                tokens = self._tokenizer.encode(request.prompt)
                return Prompt(tokens, [tokens])
            messages = self._thinking.named(request.messages)
            if not request.continue_final_message:
                return self._chat(request, messages)
            prompt = self._chat(request, messages[:-1])
            return Prompt(*continued(self._tokenizer, self._turns, prompt, request.messages[-1]))
        except Exception as error:  # templates raise anything
            raise Refused(
                400, f"[messages] the chat template refuses this: {error}"[:300], "invalid_value"
            ) from None

    def fitting(self, request: Request, limit: int) -> tuple[Prompt, int]:
        """The prompt of a chat in at most `limit` tokens, without the oldest turns behind the system's words, and how
        many messages were dropped. The last question stays, whatever its length. Raises Refused.

        Turns go by quarters of the limit, so that a chat that grows loses the same ones for a while: what is left
        begins alike, and is found in a cache."""
        messages = request.messages
        first = next((i for i, message in enumerate(messages) if message["role"] != "system"), 0)
        starts = [
            i for i, message in enumerate(messages) if message["role"] == "user" and i >= first
        ]

        def behind(start: int) -> Prompt:
            return self.read(replace(request, messages=messages[:first] + messages[start:]))

        prompt = self.read(request)
        count = len(prompt.tokens)
        if count <= limit or len(starts) < 2:
            return prompt, 0
        step = max(1, limit // 4)
        excess = -(-(count - limit) // step) * step
        # The first start that drops so much; the last one in any case.
        others = starts[1:-1]
        place = bisect_left(others, excess, key=lambda at: count - len(behind(at).tokens))
        start = [*others, starts[-1]][place]
        return behind(start), start - first

    def _chat(self, request: Request, messages: list[dict]) -> Prompt:
        extra = self._template | (request.chat_template_kwargs or {})
        # Special tokens in contents are text.
        mark, (messages, tools, extra) = self._turns.marked(messages, request.tools, extra)
        tokenizer = self._tokenizer if mark is None else Cut(self._tokenizer, self._turns, mark)
        if not tokenizer.has_chat_template:
            text = "".join(f"{PLAIN.get(m['role'], '')}{m['content']}\n" for m in messages)
            tokens = tokenizer.encode(text + PLAIN["assistant"].rstrip())
            return Prompt(tokens, [tokens])

        def render(chat: list[dict], begins: bool) -> list[int]:
            return tokenizer.apply_chat_template(
                chat, add_generation_prompt=begins, tools=tools, tokenize=True, **extra
            )

        try:
            tokens = render(messages, True)
        except Exception:  # most templates want the arguments of calls as objects, some as texts
            if (texts := with_texts(messages)) == messages:
                raise
            messages, tokens = texts, render(texts, True)
        state = "normal"
        if tokenizer.has_thinking:
            opened = tokenizer.rfind_think_start(tokens) > tokenizer.rfind_think_end(tokens)
            state = "reasoning" if opened else state
        state = getattr(tokenizer, "response_initial_state", None) or state
        if messages[-1]["role"] != "user":
            return Prompt(tokens, [tokens], state)
        first, last = 0, len(tokens)
        count = next(i for i, message in enumerate(messages) if message["role"] != "system")
        if count:
            system = render([*messages[:count], {"role": "user", "content": ""}], False)
            pairs = zip(system, tokens, strict=False)
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
        if tokenizer.has_thinking:
            tail = tokenizer.rfind_think_start(tokens, start=last - TAIL)
            last = tail if tail >= 0 else last
        first = first if first < last else 0
        parts = tokens[:first], tokens[first:last], tokens[last:]
        return Prompt(tokens, [part for part in parts if part], state)
