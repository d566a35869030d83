"""A request outside of batches, for models whose caches do not join."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step


@dataclass(frozen=True)
class PromptResponse:
    """A part of a prompt that was read. progress: tokens of it so far, and all."""

    uid: int
    progress: tuple[int, int]
    end_of_segment: bool = False
    end_of_prompt: bool = False


@dataclass(frozen=True)
class TokenResponse:
    """A token of a reply. logprobs: [V]. The caches and all their tokens come with the last one."""

    uid: int
    token: int
    logprobs: mx.array
    finish_reason: str | None = None
    prompt_cache: list | None = None
    all_tokens: list[int] | None = None


class SingleGenerator:
    """One request at a time, with the methods of mlx-lm's `BatchGenerator` that the engine calls. step: tokens of a
    prompt that are read at once. agree: turns a sampler into one that draws the same in all processes."""

    def __init__(self, model: Any, step: int, stream: mx.Stream, agree: Callable):
        self._model, self._step, self._stream, self._agree = model, step, stream, agree
        self._uid, self._cache = 0, []
        self._work: Generator[tuple[list, list], None, None] | None = None

    def insert_segments(self, segments: list, *, caches: list, **settings: list) -> list[int]:
        self._uid, self._cache = self._uid + 1, caches[0]
        prompt = [token for segment in segments[0] for token in segment]
        self._work = self._serve(self._uid, prompt, **{name: x[0] for name, x in settings.items()})
        return [self._uid]

    def next(self) -> tuple[list[PromptResponse], list[TokenResponse]]:
        return next(self._work)

    def extract_cache(self, uids: list[int]) -> dict:
        return {}

    def remove(self, uids: list[int]) -> None:
        self.close()

    def close(self) -> None:
        """Drop the request, in the thread that serves it: another one has other streams."""
        if self._work is not None:
            self._work.close()
        self._work, self._cache = None, []

    @property
    def prompt_cache_nbytes(self) -> int:
        return sum(cache.nbytes for cache in self._cache)

    def _serve(
        self,
        uid: int,
        prompt: list[int],
        max_tokens: int,
        all_tokens: list[int],
        samplers: Callable,
        logits_processors: list[Callable],
        stop_sequences: Any,
    ) -> Generator[tuple[list, list], None, None]:
        """Yield what `next` returns. The arguments are those of one request."""
        cache, tokens, total = self._cache, list(all_tokens), len(prompt)
        for start in range(0, total - 1, self._step):
            part = prompt[start : min(start + self._step, total - 1)]
            self._model(mx.array(part)[None], cache=cache)
            mx.eval([layer.state for layer in cache])
            mx.clear_cache()
            tokens += part
            yield [PromptResponse(uid, (start + len(part), total))], []
        prefix, matcher = mx.array(tokens, mx.uint32), stop_sequences.matcher()
        steps = generate_step(
            mx.array(prompt[-1:]),
            self._model,
            self._stream,
            max_tokens=max_tokens,
            sampler=self._agree(samplers),
            # Penalties count all of the text, whatever part of it a cache held.
            logits_processors=[
                partial(_with_prefix, prefix, processor) for processor in logits_processors
            ],
            prompt_cache=cache,
        )
        tokens += prompt[-1:]
        with closing(steps):
            for n, (token, logprobs) in enumerate(steps):
                tokens.append(token)
                reason = "length" if n + 1 == max_tokens else None
                reason = "stop" if matcher.advance(token) else reason
                if reason:
                    break
                yield [], [TokenResponse(uid, token, logprobs)]
        self._cache = []
        yield [], [TokenResponse(uid, token, logprobs, reason, cache, tokens)]


def _with_prefix(
    prefix: mx.array, processor: Callable, tokens: mx.array, logits: mx.array
) -> mx.array:
    return processor(mx.concatenate([prefix, tokens]), logits)
