"""Generate one request at a time, for models whose caches are not batchable."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch

from mlxkv.serve.sampling import GREEDY


class Alone(GenerationBatch):
    """A batch of one sequence, in its own caches."""

    def extract_cache(self, idx: int) -> list:
        return list(self.prompt_cache)


class SingleGenerator:
    """One request at a time, with the methods of mlx-lm's `BatchGenerator` that the engine calls. step: prefill
    chunk size in tokens."""

    def __init__(self, model: Any, step: int, stream: mx.Stream):
        self._model, self.prefill_step_size, self._stream = model, step, stream
        self._uid = 0
        self.close()

    def insert_segments(self, segments: list, *, caches: list, **settings: list) -> list[int]:
        self._uid += 1
        self._prompt = [token for segment in segments[0] for token in segment]
        self._done, self._cache, self._settings = 0, caches[0], settings
        return [self._uid]

    def next(self) -> tuple[list, list]:
        """Prefill a chunk of the prompt, or decode a token."""
        with mx.stream(self._stream):
            if self._generation_batch.uids:
                responses = self._generation_batch.next()
                if not self._generation_batch.uids:
                    self.close()
                return [], responses
            total = len(self._prompt)
            part = self._prompt[self._done : min(self._done + self.prefill_step_size, total - 1)]
            if part:
                self._model(mx.array(part)[None], cache=self._cache)
                mx.eval([layer.state for layer in self._cache])
                mx.clear_cache()
                self._settings["all_tokens"][0].extend(part)
            else:
                part, settings = self._prompt[-1:], dict(self._settings)
                self._generation_batch = Alone(
                    self._model,
                    [self._uid],
                    mx.array(part),
                    self._cache,
                    settings.pop("all_tokens"),
                    fallback_sampler=GREEDY,
                    **settings,
                )
            self._done += len(part)
            progress, ends = (self._done, total), self._done == total
            return [PromptProcessingBatch.Response(self._uid, progress, ends, ends)], []

    def extract_cache(self, uids: list[int]) -> dict:
        return {}

    def remove(self, uids: list[int]) -> None:
        self.close()

    def close(self) -> None:
        """Drop the request."""
        self._prompt, self._cache, self._settings = [], [], {}
        self._generation_batch = Alone.empty(self._model, GREEDY)

    @property
    def prompt_cache_nbytes(self) -> int:
        return sum(cache.nbytes for cache in self._cache)
