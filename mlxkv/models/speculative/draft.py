"""`Draft`: the model that drafts, its cache, and what came of its tokens.

mlx-lm's loop does the work (`stream_generate(draft_model=...)`): the draft model says N tokens greedily or by
the sampler, the model reads them in one step, and the tokens up to the first that it would not have said are
kept; caches are trimmed by the others. Compressed caches take a seal back where that cuts into the last page
(`formats/rules/going_back`), so they hold afterwards what they would hold had the refused tokens never been read.
Leviathan, Kalman, Matias: Fast Inference from Transformers via Speculative Decoding (2211.17192).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream, stream_generate, wired_limit
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.rotating.single import WindowedKVCache
from mlxkv.errors import UserError
from mlxkv.models.catalog.asked import DRAFT_TOKENS
from mlxkv.models.hooks.probe import leaves
from mlxkv.models.loader import load
from mlxkv.models.speculative.rings import trimmable
from mlxkv.models.taking_back import cut_back

TAKES_BACK = (KVCache, RotatingKVCache, CompressedKVCache)


@dataclass
class Draft:
    """A model that drafts for another one.

    loaded: from `mlxkv.models.load`. count: tokens that it drafts at once. drafted, accepted: tokens so far.
    """

    loaded: Any
    count: int = DRAFT_TOKENS
    drafted: int = field(default=0, init=False)
    accepted: int = field(default=0, init=False)
    _cache: list | None = field(default=None, init=False, repr=False)
    _held: list[int] = field(default_factory=list, init=False, repr=False)

    @property
    def acceptance(self) -> float | None:
        """The share of its tokens that were said, or None before there are any."""
        return self.accepted / self.drafted if self.drafted else None

    def __call__(self, tokens: mx.array, cache: list, **more) -> mx.array:
        """A step of the draft model, as mlx-lm's loop asks for it: one drafted token."""
        self.drafted += 1
        return self.loaded.model(tokens, cache=cache, **more)

    def read(self, tokens: Sequence[int], step: int) -> list:
        """Its cache, holding `tokens`: what it held before is cut back to the start that both share."""
        shared = 0
        for ours, theirs in zip(self._held, tokens, strict=False):
            if ours != theirs:
                break
            shared += 1
        if self._cache is not None and shared < len(self._held):
            shared *= cut_back(self._cache, len(self._held), shared)
        if self._cache is None or not shared:
            self._cache, shared = make_prompt_cache(self.loaded.model), 0
        for start in range(shared, len(tokens), step):
            part = mx.array(tokens[start : start + step])[None]
            self.loaded.model(part, cache=self._cache)
            mx.eval([cache.state for cache in self._cache])
        self._held = list(tokens)
        return self._cache

    def note(self, tokens: Sequence[int]) -> None:
        """Its cache holds a start of `tokens`, as long as its offset says; windows that have dropped tokens on
        the way are not kept."""
        kinds = {type(cache) for _, cache in leaves(self._cache or [])}
        if self._cache is None or RotatingKVCache in kinds:
            self._cache, self._held = None, []
            return
        self._held = list(tokens[: self._cache[0].offset])

    def forget(self) -> None:
        """Drop its cache: after a failure, or where another conversation begins."""
        self._cache, self._held = None, []


def make(loaded: Any, name: str, kv: str, count: int | None, **more: Any) -> Draft:
    """Load the model that drafts for `loaded`, and check it. kv: of its own cache. count: tokens at once, None
    for the default. more: for `load`. Raises UserError."""
    small = load(name, kv, **more)
    check(loaded, small)
    return Draft(small, count or DRAFT_TOKENS)


def check(loaded: Any, draft: Any) -> None:
    """Raise UserError where `draft` cannot draft for `loaded`: another tokenizer, or caches that cannot take
    tokens back."""
    ours, theirs = (one.tokenizer.get_vocab() for one in (loaded, draft))
    if ours != theirs:
        apart = sum(theirs.get(word) != token for word, token in ours.items())
        raise UserError(
            f"[--draft] {draft.name} has another tokenizer than {loaded.name}; got {len(theirs)} tokens for "
            f"{len(ours)}, {apart} of which it lacks or numbers otherwise; choose a model of the same family"
        )
    for one, role in ((loaded, "cannot verify drafts"), (draft, "cannot draft")):
        if reason := why_not(one):
            raise UserError(f"[--draft] {one.name} {role}: {reason}; leave --draft out")


def why_not(loaded: Any) -> str | None:
    """Why the caches of a model cannot take tokens back, or None."""
    caches = make_prompt_cache(loaded.model)
    if len(caches) != len(loaded.model.layers):
        return "mlx-lm's loop wants a cache for each layer, and some of its layers share one"
    other = [c for _, c in leaves(caches) if not isinstance(c, TAKES_BACK)]
    if other or len(leaves(caches)) != len(caches):
        name = type(other[0]).__name__ if other else "CacheList"
        return f"a cache of class {name} cannot take tokens back"
    if any(isinstance(cache, WindowedKVCache) for cache in caches):
        return "a compressed sliding window does not take tokens back once it is full"
    if any(cache.observes for cache in caches if isinstance(cache, CompressedKVCache)):
        return "its cache has seen the queries of refused tokens, and does not forget them"
    return None


def stream(
    loaded: Any,
    draft: Draft,
    tokens: Sequence[int],
    cache: list,
    before: Sequence[int] = (),
    *,
    progress: Callable[[int, int], None] | None = None,
    prefill_step_size: int = 512,
    max_tokens: int = 256,
    tokenizer: Any = None,
    **more: Any,
) -> Iterator[Any]:
    """mlx-lm's `stream_generate` with a draft model. The prompt is read here, so that its progress is told.

    tokens: of the prompt that `cache` does not hold. before: those that it holds. progress: called with
    (tokens done, all tokens). tokenizer: of the reply, by default the model's. more: for `stream_generate`.
    However it ends, `cache` holds the prompt and every token that was yielded, as without a draft.
    """
    last, size, written = list(tokens[-1:]), len(tokens), []
    where = more.get("stream", generation_stream)
    with wired_limit(loaded.model, [where]), mx.stream(where):
        if progress:
            progress(0, size)
        for start in range(0, size - 1, prefill_step_size):
            part = tokens[start : min(start + prefill_step_size, size - 1)]
            loaded.model(mx.array(part)[None], cache=cache)
            mx.eval([one.state for one in cache])
            mx.clear_cache()
            if progress:
                progress(start + len(part), size)
        theirs = draft.read([*before, *tokens[:-1]], prefill_step_size)
    with trimmable(cache), trimmable(theirs):
        responses = stream_generate(
            loaded.model,
            tokenizer or loaded.tokenizer,
            mx.array(last),
            max_tokens=max_tokens,
            draft_model=draft,
            num_draft_tokens=draft.count,
            prompt_cache=[*cache, *theirs],
            prefill_step_size=prefill_step_size,
            **more,
        )
        failed = False
        try:
            for response in responses:
                if not written and progress:
                    progress(size, size)
                written.append(response.token)
                draft.accepted += bool(response.from_draft)
                yield response
        except Exception:
            failed = True
            raise
        finally:
            responses.close()
            del responses  # with it mlx-lm's own loop ends, which trims the caches
            if failed:
                draft.forget()
            else:
                _complete(loaded.model, cache, [*before, *tokens, *written], where)
                draft.note([*before, *tokens, *written])


def _complete(model: Any, cache: list, said: list[int], where: Any) -> None:
    """Read the last token where the caches lack it: the model said it behind the last draft."""
    if cache[0].offset == len(said) - 1:
        with mx.stream(where):
            model(mx.array(said[-1:])[None], cache=cache)
            mx.eval([one.state for one in cache])
