"""A conversation: its messages and the cache that holds them. Each turn reads only what is new."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from os.path import commonprefix
from pathlib import Path

import mlx.core as mx

from mlxkv import console, errors
from mlxkv.errors import MachineError, UserError
from mlxkv.formats.session import PackedFile
from mlxkv.generate import prompt_cache
from mlxkv.generate.generation import Stats, new_cache, read, stream
from mlxkv.generate.prompt_escaping import PromptEscaper, cut_front
from mlxkv.generate.roles import Thinking, takes_system, without_system
from mlxkv.generate.usage import Usage, projected, usage
from mlxkv.loading.warmup import step_down
from mlxkv.patching.trees import trim_caches

THINKING = "enable_thinking"  # name of the switch in chat templates of thinking models
UNKNOWN = 1 << 20  # most tokens of a reply if the model's context is unknown


class Session:
    """One chat on one loaded model.

    messages: the conversation. tokens: those in the cache. text: the same tokens as text, as the chat template wrote
    it. stats: counts and times of the last reply. opened: whether its prompt ended with the opening mark of thoughts.
    raw: without a chat template; prompts and replies are joined as plain text. max_tokens: longest reply; None: until
    the context is full. template: extra arguments of the chat template. processors: mlx-lm's logits processors.
    """

    def __init__(
        self,
        loaded,
        system: str | None = None,
        raw: bool = False,
        sampler: Callable[[mx.array], mx.array] | None = None,
        max_tokens: int | None = None,
        template: dict | None = None,
        processors: Sequence[Callable[[mx.array, mx.array], mx.array]] = (),
    ):
        if not raw and not loaded.tokenizer.has_chat_template:
            raise UserError(
                "[chat] tokenizer has no chat template; use --raw to continue plain text"
            )
        self.loaded, self.raw, self.sampler, self.max_tokens = loaded, raw, sampler, max_tokens
        self.system, self.template = system, template or {}
        self.processors = processors
        template_text = str(getattr(loaded.tokenizer, "chat_template", None) or "")
        if THINKING in self.template and THINKING not in template_text:
            raise UserError(
                f"[--think] the chat template of {loaded.name} has no switch for thinking; leave it out"
            )
        self.escaper, self.thinking = PromptEscaper(loaded.tokenizer), Thinking(loaded.tokenizer)
        self.limit = loaded.context or 0
        self._packed: list[int] = []  # tokens of the pack that the conversation began with
        self.told = False  # what the whole context will take
        self.reset()

    def reset(self) -> None:
        """Forget the conversation; keep the system prompt, and the pack."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.stats, self.opened, self._prefix = Stats(), False, []
        if self._packed:
            self._reuse([*self._packed, -1])
            self.text = ""
        else:
            self._forget_cache()

    def _forget_cache(self) -> None:
        """Start a new cache; the next turn reads the whole conversation again."""
        self.cache = new_cache(self.loaded)
        self.tokens: list[int] = []
        self.text = ""

    def read(
        self,
        progress: Callable[[int, int], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> bool:
        """Read what every next question begins with, without a reply. Returns whether all of it was read."""
        tokens = self._start()
        if self.limit and len(tokens) >= self.limit:
            raise UserError(
                f"[read] longer than the model's context; got {len(tokens):,} tokens; {self.loaded.name} takes "
                f"{self.limit:,}, questions and replies included; read less"
            )
        reused = self._reuse([*tokens, -1])
        held = read(self.loaded, tokens[reused:], self.cache, progress, stop)
        self.tokens, self.text = tokens[: reused + held], ""
        return len(self.tokens) == len(tokens)

    def _start(self) -> list[int]:
        """Return the tokens with which every next question begins."""
        asked = ([*self.messages, {"role": "user", "content": words}] for words in ("0", "Who?"))
        return list(commonprefix([self._render(messages)[1] for messages in asked]))

    def ask(
        self,
        prompt: str,
        progress: Callable[[int, int], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Iterator[str]:
        """Yield the reply in pieces. The session survives a failure or a stop."""
        if not prompt.strip():
            raise UserError("[chat] empty prompt; write something, or pass --prompt TEXT")
        messages = [*self.messages, {"role": "user", "content": prompt}]
        text, tokens = self._render(messages)
        if self.limit and len(tokens) >= self.limit:
            raise UserError(
                f"[chat] prompt is longer than the model's context; got {len(tokens)} tokens; "
                f"{self.loaded.name} takes {self.limit}, the reply included"
            )
        start = self.thinking.start
        self.opened = bool(start) and text.rstrip().endswith(start)
        budget = self.limit - len(tokens) if self.limit else UNKNOWN
        if self.max_tokens is not None:
            budget = min(budget, self.max_tokens)
        self._prefix = tokens[-1:] if self.raw else []
        reused = self._reuse(tokens)
        self.stats, reply, prompt_length, earlier = Stats(), "", len(tokens), []
        clean = False
        try:
            while not clean:
                try:
                    for piece in stream(
                        self.loaded,
                        tokens[reused:],
                        self.cache,
                        sampler=self.sampler,
                        max_tokens=max(1, budget - len(tokens) + prompt_length),
                        progress=None if earlier else progress,
                        stop=stop,
                        stats=self.stats,
                        processors=self.processors,
                        prefix=[] if earlier else self._prefix,
                    ):
                        tokens.append(piece.token)
                        new = piece.text
                        if earlier:
                            new = self._rest(
                                reply, tokens[prompt_length:], self.stats.finish_reason, new
                            )
                        reply += new
                        clean = True
                        yield new
                        clean = False
                    clean = True
                except RuntimeError as error:
                    instead = self._instead(error)
                    console.warn(f"\n{instead}" if reply else instead)
                    earlier.append(self.stats)
                    self.stats, reused = Stats(), 0  # the prompt is read again
                    self._forget_cache()
        except GeneratorExit:
            pass  # the caller stopped; it keeps what it has read
        finally:
            self._close(clean, messages, text, tokens, reused, reply, earlier)

    def _instead(self, error: RuntimeError) -> str:
        """Switch off what failed, and return a line about what runs instead. Raises MachineError if nothing can."""
        if isinstance(error, MachineError):
            raise error
        if instead := step_down(self.loaded, error):
            return instead
        raise MachineError(
            f"[generate] {errors.reason(error)}; the conversation is kept, its cache is made anew"
        ) from error

    def _rest(self, reply: str, written: list[int], finish: str, new: str) -> str:
        """Return the text that follows `reply` when it continues after a failure, decoded from all tokens: the piece
        `new` lacks the text that was held back at the failure."""
        decoded = self._decode(written[:-1] if finish == "stop" else written)
        if not decoded.startswith(reply):
            return new
        return decoded[len(reply) :] if finish or not decoded.endswith("\ufffd") else ""

    def _close(self, clean, messages, text, tokens, reused, reply, earlier) -> None:
        """Update messages, tokens and cache after a reply, a stop or a failure. earlier: stats of the parts before
        failures from which the reply recovered."""
        for part in earlier:
            self.stats.generated_tokens += part.generated_tokens
            self.stats.decode_seconds += part.decode_seconds
            self.stats.prefill_seconds += part.prefill_seconds
            self.stats.read_tokens += part.read_tokens
        self.stats.prompt_tokens = len(tokens) - self.stats.generated_tokens
        if not clean:
            self._forget_cache()  # layers may hold different tokens, or NaN
            return
        self.tokens = tokens[: reused + self.stats.held]
        if not self.stats.generated_tokens:  # stopped while the prompt was read
            self.text = ""
            return
        written = tokens[-self.stats.generated_tokens :]
        complete = len(self.tokens) == len(tokens)  # else stopped while a reply was recovered
        self.text = text + self._decode(written)
        if self.stats.finish_reason == "stop":
            written = written[:-1]  # the template writes the token that ends a turn
        self.messages = self._with_reply(messages, reply, self._decode(written))
        if not complete:
            self.text = ""

    def _decode(self, tokens: list[int]) -> str:
        """Return the text of tokens of the reply; with --raw, in the context of the prompt's last token."""
        prefix, text = (
            self.loaded.tokenizer.decode(part, skip_special_tokens=False) if part else ""
            for part in (self._prefix, [*self._prefix, *tokens])
        )
        return text[len(prefix) :]

    def _with_reply(self, messages: list[dict], shown: str, exact: str) -> list[dict]:
        """Return the conversation with the reply worded so that the template reproduces the cached text, and the cache
        is reused. shown: the streamed text; after a stop, without what was held back. exact: the text of all tokens.
        Some templates write the reply's leading space themselves."""
        for content in (shown, exact, shown.removeprefix(" ")):
            candidate = [*messages, self._reply(content)]
            try:
                if "".join(self._pieces(candidate)).startswith(self.text):
                    return candidate
            except UserError:  # raised again by the next question
                pass
        return [*messages, self._reply(shown)]

    def _reply(self, text: str) -> dict:
        if self.raw:
            return {"role": "assistant", "content": text}
        return self.thinking.message(text, self.opened)

    def _render(self, messages: list[dict]) -> tuple[str, list[int]]:
        """Return the conversation as text and as tokens. If the text only grows, the cached tokens are kept: encoding a
        reply may give other tokens than the model wrote."""
        pieces = self._pieces(messages)
        text = "".join(pieces)
        if self.text and text.startswith(self.text):
            pieces = cut_front(pieces, len(self.text))
            return text, self.tokens + self.escaper.encode(pieces, context=self.text)
        # A chat template writes its own start token.
        return text, self.escaper.encode(pieces, add_special_tokens=self.raw)

    def _pieces(self, messages: list[dict]) -> list[str]:
        """Return the conversation as text, in pieces to encode separately."""
        if self.raw:
            return ["".join(message["content"] for message in messages)]
        messages = self.thinking.named(messages)
        if messages[0]["role"] == "system" and not self._takes_system:
            messages = without_system(messages)
        try:
            return self.escaper.render(messages, add_generation_prompt=True, **self.template)
        except Exception as error:  # of jinja, or raised by the template
            raise UserError(
                f"[chat] the model's chat template refuses this: {errors.brief(error)}"
            ) from None

    @cached_property
    def _takes_system(self) -> bool:
        takes = takes_system(self.loaded.tokenizer, self.template)
        if not takes:
            console.warn(
                f"the chat template of {self.loaded.name} takes no system message; "
                "its words stand in front of the first question"
            )
        return takes

    def _reuse(self, tokens: list[int]) -> int:
        """Trim the cache to the prefix shared with `tokens`, and return its length. At least one token
        remains to be read. A cache that cannot be trimmed (a sliding window that has moved on) is dropped."""
        shared = len(commonprefix([self.tokens, tokens[:-1]]))
        if shared == len(self.tokens):
            return shared
        if not trim_caches(self.cache, len(self.tokens), shared):
            self._forget_cache()
            return 0
        self.tokens = self.tokens[:shared]
        self.text = ""
        return shared

    @property
    def cut_off(self) -> str | None:
        """Return a sentence about how the last reply was cut off, or None."""
        if self.stats.finish_reason != "length":
            return None
        count = self.stats.generated_tokens
        full = self.limit and len(self.tokens) + 1 >= self.limit
        reason = "the model's context is full" if full else "raise --max-tokens for more"
        return f"cut off at {count} tokens; {reason}"

    def usage(self) -> Usage:
        """Return the measured memory of the caches."""
        return usage(self.cache)

    def projected(self, tokens: int) -> Usage:
        """Return the memory that the caches will take with `tokens` tokens."""
        return projected(self.cache, tokens)

    def save(self, name: str):
        """Write the session to a file, completely or not at all, and return its path."""
        saved = prompt_cache.Saved(self.cache, self.tokens, self.messages, self.text, self.raw)
        with console.hold_signals():
            return prompt_cache.save(name, saved, self.loaded)

    def pack(self, path: Path, files: list[PackedFile], asked: str) -> None:
        """Write what was read as a pack. files: its sources. asked: how to name the model."""
        saved = prompt_cache.Saved(
            self.cache, self.tokens, self.messages, "", self.raw, files, asked
        )
        with console.hold_signals():
            prompt_cache.write(path, saved, self.loaded, "read")

    def load(self, name: str) -> prompt_cache.Saved:
        """Replace the session by a saved one, and return it. Raises UserError, and changes nothing, for a file that is
        refused."""
        saved = prompt_cache.load(name, self.loaded)
        if saved.raw != self.raw:
            raise UserError(
                f"[load] {name!r} was saved {'with' if saved.raw else 'without'} --raw; "
                f"this session runs {'with' if self.raw else 'without'} it"
            )
        self.cache, self.tokens = saved.cache, saved.tokens
        self.messages, self.text = saved.messages, saved.text
        self.stats, self._packed = Stats(), []
        if saved.files:
            self.system, self._packed = saved.messages[0]["content"], list(saved.tokens)
        return saved
