"""Requests become tokens in processes of their own: what JSON, templates, schemas and tokenizers make of eight million
bytes takes seconds and gigabytes, in which no stream of other clients may wait.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from uuid import uuid4

from starlette.concurrency import run_in_threadpool

from mlxkv.errors import MachineError
from mlxkv.models.catalog.bounded import Excess, Process, ProcessStopped
from mlxkv.models.prompt_escaping import Cut, PromptEscaper, pieces, with_texts
from mlxkv.models.replies.continuing import continued
from mlxkv.models.replies.thinking import NAMES, Thinking
from mlxkv.models.roles import alternating, takes_system, without_system
from mlxkv.serve.apis import anthropic, openai, responses
from mlxkv.serve.apis.body import document
from mlxkv.serve.apis.reply import Reply
from mlxkv.serve.grammar import Grammars, Postponed
from mlxkv.serve.refusals import Refused, ending
from mlxkv.serve.request import DEFAULT_NAMES, ModelInfo, Prompt, Request


class API(NamedTuple):
    """How the requests of a path are read, and in which words their replies are written."""

    read: Callable[[dict, ModelInfo], Request]
    reply: type[Reply]


CHATS = API(openai.read_chat, openai.CompletionReply)
RESPONSES = API(responses.read_response, responses.ResponsesReply)
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
APIS = {
    "/v1/chat/completions": CHATS,
    "/chat/completions": CHATS,
    "/v1/completions": API(openai.read_text, openai.CompletionReply),
    MESSAGES: API(anthropic.read_messages, anthropic.MessagesReply),
    "/v1/responses": RESPONSES,
    "/responses": RESPONSES,
}
SECONDS = 3.0  # of processor time for a request
PACE = 1 << 20  # bytes for which it has a second more
MEMORY = 1 << 30  # bytes that one request may take
# Bytes of a body that is read in the second process, as is one with a schema: others do not wait for it.
LARGE = 256 << 10
EVERY = 3  # turns of a key, one of which goes to the request that waits longest
PROCESSES = Process(__name__), Process(__name__)
TAIL = 11  # tokens at the end of a prompt, in which templates begin thoughts
# A chat for a model without a template, as mlx-lm writes it.
PLAIN = {"system": "ASSISTANT's RULE: ", "user": "USER: ", "assistant": "ASSISTANT: "}


class Read(NamedTuple):
    """A request that was read. dropped: messages of its chat that the context had no room for."""

    request: Request
    prompt: Prompt
    dropped: int = 0


class WorkerQueue:
    """The turns at a process, one request at a time. Keys come one after the other; of one key the smallest body comes
    first, and every `EVERY`th time the one that waits longest. So a request waits for at most `EVERY` others of each
    key for itself and for each of its own key that was there before it. For the event loop."""

    def __init__(self, process: Process):
        self._process, self.busy = process, False
        # By key, the one whose turn it is first: its turns, and bodies that wait, the oldest first.
        self._waiting: dict[str | None, tuple[int, list[tuple[int, asyncio.Future]]]] = {}

    @asynccontextmanager
    async def acquire(self, size: int, key: str | None = None) -> AsyncIterator[Process]:
        """Wait for the process, with a body of `size` bytes from a client with this API key."""
        if self.busy:
            future = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(key, (0, []))[1].append((size, future))
            try:
                await future
            except asyncio.CancelledError:
                if not future.cancelled():  # it was given in the same moment
                    self._pass_on()
                raise
        self.busy = True
        try:
            yield self._process
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        for key in list(self._waiting):
            escaper, bodies = self._waiting.pop(key)
            bodies = [
                body for body in bodies if not body[1].done()
            ]  # of clients that are still there
            if not bodies:
                continue
            escaper += 1
            body = bodies[0] if escaper % EVERY == 0 else min(bodies, key=lambda body: body[0])
            bodies.remove(body)
            body[1].set_result(None)
            if bodies:
                self._waiting[key] = escaper, bodies
            return
        self.busy = False


class Reader:
    """Reads the requests for one model. For the event loop.

    tokenizer: mlx-lm's wrapper. template: what chat templates are given besides messages.
    """

    def __init__(self, tokenizer: Any, template: dict, model_info: ModelInfo):
        self._model_info, self._key = model_info, uuid4().hex
        self._queues = [WorkerQueue(process) for process in PROCESSES]
        system = takes_system(tokenizer, template)
        if not system:
            logging.warning(
                f"[serve] the chat template of {model_info.model} takes no system message; "
                "its words stand in front of the first question"
            )
        self._setup = _keep, self._key, tokenizer, template, system, model_info.vocabulary
        try:
            pickle.dumps(self._setup)
        except Exception:  # a tokenizer of C++, which no other process can have
            logging.warning("[serve] this model's tokenizer reads requests in the server itself")
            _keep(*self._setup[1:])
        _open.add(self._key)

    def close(self) -> None:
        _open.discard(self._key)
        _kept.pop(self._key, None)

    async def read(
        self,
        path: str,
        raw: bytes,
        budget: int | None,
        names: tuple = (),
        client_key: str | None = None,
    ) -> Read | int | str:
        """Return the request in a body; at COUNT the number of its tokens; the model that it names where that is not
        this one, and others have `names`. budget: tokens that the memory has room for, where a chat that is too long
        loses its oldest turns. client_key: by which clients take turns. Raises Refused."""
        if self._key not in _open:
            raise ending()
        seconds = SECONDS + len(raw) // PACE

        def ask(process: Process) -> Any:
            here = self._key in _kept
            model_info = replace(self._model_info, compiles=here or process is not PROCESSES[0])
            question = _read, self._key, path, raw, model_info, budget, names
            data = pickle.dumps((frozenset(_open), *question))
            if here:
                return pickle.loads(_answer(data))
            while not (answer := process.ask(data, seconds, MEMORY)):  # it does not know this model
                if self._key not in _open:  # closed while this waited
                    raise ending()
                process.ask(pickle.dumps((frozenset(_open), *self._setup)))
            return pickle.loads(answer)

        try:
            for queue in self._queues[len(raw) > LARGE :]:
                async with queue.acquire(len(raw), client_key) as process:
                    result = await run_in_threadpool(ask, process)
                if not isinstance(result, Postponed):
                    break
        except Excess as error:
            raise Refused(400, f"[body] {error} to read", "too_complex") from None
        except ProcessStopped as error:
            raise Refused(503, str(error), "busy", retry=5) from None
        if isinstance(result, Exception):
            raise result
        return result


# -- in the process


class Prompts:
    """Makes tokens of requests. template: what chat templates are given besides messages. takes_system: whether this
    one takes words of the system."""

    def __init__(self, tokenizer: Any, template: dict, takes_system: bool = True):
        self._tokenizer, self._template = tokenizer, template
        self._takes_system = takes_system
        self._escaper, self._thinking = PromptEscaper(tokenizer), Thinking(tokenizer)

    def read(self, request: Request) -> Prompt:
        """Return the prompt of a request, of any length. Raises Refused where a template fails."""
        try:
            if not request.chat:
                tokens = request.prompt  # perhaps tokens already
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
        """Return the prompt of a chat in at most `limit` tokens, without the oldest turns behind the system's words,
        and how many messages were dropped. The last question stays, whatever its length. Raises Refused.

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

    def _chat(self, request: Request, messages: list[dict], reply: dict | None = None) -> Prompt:
        """Return the prompt of messages. reply: its start, which goes on."""
        extra = self._template | (request.chat_template_kwargs or {})
        # Special tokens in contents are text.
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
        """Return the prompt of messages, whose tokens these are."""
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


def _accepted(messages: list[dict], render: Callable) -> tuple[list[dict], list[int]]:
    """Messages in the first form that the chat template takes, and their tokens. Raises what the last one raises."""
    error: Exception | None = None
    for form in _forms(messages):
        try:
            return form, render(form)
        except (MemoryError, Excess):
            raise
        except Exception as found:  # templates raise anything
            error = found
    assert error is not None  # there is one form at the least
    raise error


def _blank(messages: list[dict], text: str, reply: dict, render: Callable) -> str:
    """Return the blanks that the chat template writes between the prompt and the reply. text: of the messages."""
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
    """Yield messages as most templates want them, with the arguments of calls as texts, with sides that take turns."""
    yield messages
    if (texts := with_texts(messages)) != messages:
        yield texts
    if (escaper := alternating(messages)) != messages:
        yield escaper
        if texts != messages:
            yield with_texts(escaper)


_open: set[str] = set()  # the keys of readers; in the server
_kept: dict[str, tuple[Prompts, Grammars]] = {}


def prepare() -> Callable[[bytes], bytes]:
    """Return what answers in the process."""
    return _answer


def _answer(question: bytes) -> bytes:
    """Call a function of this module. question: the keys of readers that are open, it and its arguments, pickled; so is
    what it returns or raises, b"" where it reads for one that is not known here."""
    keys, function, key, *arguments = pickle.loads(question)
    for closed in _kept.keys() - keys:
        del _kept[closed]
    if function is _read and key not in _kept:
        return b""
    try:
        result = function(key, *arguments)
    except MemoryError:
        raise
    except (Refused, Postponed) as error:
        result = error
    except Exception as error:
        result = MachineError(f"[serve] {type(error).__name__}: {error}")
    return pickle.dumps(result)


def _keep(key: str, tokenizer: Any, template: dict, system: bool, vocabulary: int) -> None:
    _kept[key] = Prompts(tokenizer, template, system), Grammars(tokenizer, vocabulary)


def _read(
    key: str,
    path: str,
    raw: bytes,
    model_info: ModelInfo,
    budget: int | None,
    names: tuple[str, ...],
) -> Read | int | str:
    (prompts, grammars), body = _kept[key], document(raw)
    name = body.get("model")
    if names and isinstance(name, str) and name not in (model_info.model, *DEFAULT_NAMES):
        return name
    if path == COUNT:
        return len(prompts.read(anthropic.read_messages(body, model_info)).tokens)
    request, dropped = APIS[path].read(body, model_info), 0
    if request.grammar is not None:
        grammars.try_out(request.grammar)
    if request.chat and budget is not None:
        prompt, dropped = prompts.fitting(request, budget - min(request.max_tokens, budget // 4))
    else:
        prompt = prompts.read(request)
    count = len(prompt.tokens)
    if not count:
        raise Refused(400, "[prompt] has no tokens; got an empty one", "invalid_value")
    if model_info.context and count >= model_info.context:
        reason = f"got {count} tokens; it takes {model_info.context}, the reply included"
        message = f"[prompt] longer than the model's context; {reason}"
        # By these words Anthropic's clients know that a chat has to be summed up.
        if path == MESSAGES:
            message = f"prompt is too long: {count} tokens > {model_info.context} maximum"
        raise Refused(400, message, "context_length_exceeded")
    request = replace(request, prompt="", messages=[], chat_template_kwargs=None)
    return Read(request, prompt, dropped)
