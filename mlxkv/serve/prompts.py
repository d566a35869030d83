"""Turn requests into tokens: parse the body for its API, render the chat template, encode."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from mlxkv.catalog.bounded import Excess
from mlxkv.generate.prompt_escaping import Cut, PromptEscaper, continued, pieces, with_texts
from mlxkv.generate.roles import NAMES, Thinking, alternating, without_system
from mlxkv.serve.apis import anthropic, openai, responses
from mlxkv.serve.apis.body import document
from mlxkv.serve.apis.reply import Reply
from mlxkv.serve.grammar import Grammars
from mlxkv.serve.refusals import OtherModel, Refused
from mlxkv.serve.request import DEFAULT_NAMES, ModelInfo, Prompt, Read, Request


class API(NamedTuple):
    """The request parser and the reply class of a path."""

    read: Callable[[dict, ModelInfo], Request]
    reply: type[Reply]


CHATS = API(openai.read_chat, openai.CompletionReply)
RESPONSES = API(responses.read_response, responses.ResponsesReply)
MESSAGES = API(anthropic.read_messages, anthropic.MessagesReply)
COUNT = "/v1/messages/count_tokens"  # counts tokens, no reply
APIS = {
    "/v1/chat/completions": CHATS,
    "/chat/completions": CHATS,
    "/v1/completions": API(openai.read_text, openai.CompletionReply),
    "/v1/messages": MESSAGES,
    COUNT: MESSAGES,
    "/v1/responses": RESPONSES,
    "/responses": RESPONSES,
}
TAIL = 11  # last tokens of a prompt, where templates open thinking
# A chat for a model without a template, as mlx-lm writes it.
PLAIN = {"system": "ASSISTANT's RULE: ", "user": "USER: ", "assistant": "ASSISTANT: "}


class Prompts:
    """Turns requests into tokens. template: extra arguments of the chat template. takes_system: whether the template
    accepts system messages. vocabulary: columns of the logits. packs: texts that chats begin with, by the name of the
    model that asks for them."""

    def __init__(
        self,
        tokenizer: Any,
        template: dict,
        takes_system: bool = True,
        vocabulary: int = 0,
        packs: dict[str, str] | None = None,
    ):
        self._packs = packs or {}
        self._tokenizer, self._template = tokenizer, template
        self._takes_system, self._grammars = takes_system, Grammars(tokenizer, vocabulary)
        self._escaper, self._thinking = PromptEscaper(tokenizer), Thinking(tokenizer)

    def read(
        self, path: str, raw: bytes, model_info: ModelInfo, budget: int | None, names: tuple = ()
    ) -> Read:
        """Parse a request body. budget: tokens that fit in memory; longer chats that allow it lose their oldest
        turns. names: other models. Raises Refused, Postponed, and OtherModel."""
        body = document(raw)
        name = body.get("model")
        pack = self._packs.get(name) if isinstance(name, str) else None
        known = pack is not None or name in (model_info.model, *DEFAULT_NAMES)
        if names and isinstance(name, str) and not known:
            raise OtherModel(name)
        if pack is not None:
            body = body | {"model": model_info.model}
        request, dropped = APIS[path].read(body, model_info), 0
        if pack is not None:
            request = replace(_behind(pack, request), pack=name)
        if path == COUNT:
            return Read(request, self.prompt(request))
        if request.grammar is not None:
            self._grammars.try_out(request.grammar)
        if request.chat and budget is not None:
            room = budget - min(request.max_tokens, budget // 4)
            prompt, dropped = self.fitting(request, room)
        else:
            prompt = self.prompt(request)
        count, context = len(prompt.tokens), model_info.context
        if not count:
            raise Refused(400, "[prompt] has no tokens; got an empty one", "invalid_value")
        if context and count >= context:
            # Clients know this error by its words, and shorten the chat: Anthropic's and LangChain by "prompt is too
            # long", LiteLLM, and with it aider, by OpenAI's.
            message = f"prompt is too long: {count} tokens > {context} maximum"
            if APIS[path] is not MESSAGES:
                message += f"; this model's maximum context length is {context}, reply included"
                message = f"[prompt] {message}"
            raise Refused(400, message, "context_length_exceeded")
        request = replace(request, prompt="", messages=[], chat_template_kwargs=None)
        return Read(request, prompt, dropped)

    def prompt(self, request: Request) -> Prompt:
        """Return the prompt of a request, of any length. Raises Refused if the template fails."""
        try:
            if not request.chat:
                tokens = request.prompt  # text or tokens
                if isinstance(tokens, str):
                    tokens = self._escaper.encode([tokens], add_special_tokens=True)
                return Prompt(tokens, [tokens])
            messages = self._thinking.named(request.messages)
            if not request.continue_final_message:
                return self._chat(request, messages)
            return self._chat(request, messages[:-1], request.messages[-1])
        except MemoryError:  # which ends the process
            raise
        except Exception as error:  # templates raise anything
            reason = f"[messages] the chat template refuses this: {error}"[:300]
            raise Refused(400, reason, "invalid_value") from None

    def fitting(self, request: Request, limit: int) -> tuple[Prompt, int]:
        """Return a chat's prompt in at most `limit` tokens, dropping the oldest turns after the system message, and the
        number of dropped messages. The last question is always kept. Raises Refused.

        Turns are dropped in steps of a quarter of the limit, so that a growing chat keeps the same prefix for several
        turns and hits the cache."""
        messages = request.messages
        first = next((i for i, message in enumerate(messages) if message["role"] != "system"), 0)
        starts = [
            i for i, message in enumerate(messages) if message["role"] == "user" and i >= first
        ]

        def prompt_from(start: int) -> Prompt:
            return self.prompt(replace(request, messages=messages[:first] + messages[start:]))

        prompt = self.prompt(request)
        count = len(prompt.tokens)
        if count <= limit or len(starts) < 2:
            return prompt, 0
        step = max(1, limit // 4)
        excess = -(-(count - limit) // step) * step
        # The first start that drops enough, else the last one.
        others = starts[1:-1]
        place = bisect_left(others, excess, key=lambda at: count - len(prompt_from(at).tokens))
        start = [*others, starts[-1]][place]
        return prompt_from(start), start - first

    def _chat(self, request: Request, messages: list[dict], reply: dict | None = None) -> Prompt:
        """Return the prompt of messages. reply: its given start, to be continued."""
        extra = self._template | (request.chat_template_kwargs or {})
        # Special tokens in message contents are encoded as plain text.
        mark, (messages, tools, extra) = self._escaper.marked(messages, request.tools, extra)
        tokenizer = self._tokenizer if mark is None else Cut(self._tokenizer, self._escaper, mark)

        def render(chat: list[dict], begins: bool = True, tokenize: bool = True) -> Any:
            if not tokenizer.has_chat_template:
                text = "".join(f"{PLAIN.get(m['role'], '')}{m['content']}\n" for m in chat)
                text += PLAIN["assistant"].rstrip() if begins else ""
                return tokenizer.encode(text) if tokenize else text
            chat = chat if self._takes_system else without_system(chat)
            return tokenizer.apply_chat_template(
                chat, add_generation_prompt=begins, tools=tools, tokenize=tokenize, **extra
            )

        messages, tokens = _accepted(messages, render)
        prompt = self._cut(messages, tokens, render)
        if reply is None:
            return prompt
        text = render(messages, tokenize=False)
        parts = pieces(text + _blank(messages, text, reply, render), mark)
        return Prompt(*continued(self._tokenizer, self._escaper, prompt, parts, reply))

    def _cut(self, messages: list[dict], tokens: list[int], render: Callable) -> Prompt:
        """Split the tokens of messages into the prompt's segments."""
        tokenizer = self._tokenizer
        if not tokenizer.has_chat_template:
            return Prompt(tokens, [tokens])
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


def _behind(pack: str, request: Request) -> Request:
    """Return a chat that begins with the text of a pack. Raises Refused for text that is no chat."""
    if not request.chat:
        reason = "[model] a pack begins chats; got plain text; choose /v1/chat/completions"
        raise Refused(400, reason, "invalid_value")
    messages = request.messages
    if messages[0]["role"] == "system":
        first, *messages = messages
        pack = f"{pack}\n\n{first['content']}"
    return replace(request, messages=[{"role": "system", "content": pack}, *messages])


def _accepted(messages: list[dict], render: Callable) -> tuple[list[dict], list[int]]:
    """Return messages in the first form that the chat template accepts, and their tokens. Raises the last error."""
    error: Exception | None = None
    for form in _forms(messages):
        try:
            return form, render(form)
        except (MemoryError, Excess):
            raise
        except Exception as found:  # templates raise anything
            error = found
    assert error is not None  # there is at least one form
    raise error


def _blank(messages: list[dict], text: str, reply: dict, render: Callable) -> str:
    """Return the whitespace that the chat template writes between prompt and reply. text: rendered messages."""
    content = reply["content"]
    if not content or any(reply.get(name) for name in NAMES):
        return ""
    chat = [*messages, {"role": "assistant", "content": content}]
    try:
        complete = render(chat, begins=False, tokenize=False)
    except (MemoryError, Excess):
        raise
    except Exception:  # templates raise anything
        return ""
    blank, content, _ = complete.removeprefix(text).partition(content)
    return blank if content and blank.isspace() and complete.startswith(text) else ""


def _forms(messages: list[dict]) -> Iterator[list[dict]]:
    """Yield messages in most templates' form, then with call arguments as text, then with alternating roles."""
    yield messages
    if (texts := with_texts(messages)) != messages:
        yield texts
    if (escaper := alternating(messages)) != messages:
        yield escaper
        if texts != messages:
            yield with_texts(escaper)
