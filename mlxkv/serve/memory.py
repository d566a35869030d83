"""Memory for caches: the need of a request, computed before it runs, and the reservations."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable
from typing import cast

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache

from mlxkv.console import human_bytes
from mlxkv.formats.sizes import CacheShape
from mlxkv.generate.usage import shape_of
from mlxkv.machine import footprint
from mlxkv.patching.trees import leaves
from mlxkv.serve.refusals import Refused


def used_memory() -> int:
    """Return the bytes in use: MLX's arrays or the whole process, whichever is larger."""
    return max(mx.get_active_memory(), footprint())


def shapes_of(caches: list) -> list[CacheShape]:
    """Return the shapes of caches with one token, including caches inside mlx-lm's CacheList."""
    return [shape_of(cache) for _, cache in leaves(caches)]


def cut_padding(caches: Iterable) -> None:
    """Drop padding common to all rows of mlx-lm's batched caches: otherwise they grow by a chunk of the longest
    prompt whenever a shorter one ends."""
    for cache in caches:
        cut_padding(getattr(cache, "caches", ()))
        if isinstance(cache, BatchKVCache) and not cache.empty():
            padding = cast(list[int], cache.left_padding.tolist())
            if min(padding) > 0:
                cache.filter(list(range(len(padding))))


class Memory:
    """The byte budget of all caches: reserved for requests, or stored for later.

    chunk: prefill chunk size in tokens. batched: whether requests run in batches. For the generation thread; other
    threads may read numbers.
    """

    def __init__(self, bound: int, shapes: list[CacheShape], chunk: int, batched: bool = False):
        self.bound, self.shapes, self.chunk = bound, shapes, chunk
        # In mlx-lm's own batches every sequence is padded to the longest.
        alike = [batched and s.numbers > 0 and s.config is None for s in shapes]
        self._alike = [s for s, padded in zip(shapes, alike, strict=True) if padded]
        self._own = [s for s, padded in zip(shapes, alike, strict=True) if not padded]
        self._promised: dict[Hashable, tuple[int, int]] = {}  # bytes: own size, padded part

    def need(self, tokens: int) -> int:
        """Return the maximum bytes of one sequence of `tokens` tokens that runs alone."""
        return sum(shape.allocated(tokens, self.chunk, most=True) for shape in self.shapes)

    def in_use(self, tokens: int, rests: bool = False) -> int:
        """Return the bytes of one sequence of `tokens` tokens, without slack. rests: whether in the block store."""
        return sum(shape.held(tokens, rests=rests) for shape in self.shapes)

    def fp16(self, tokens: int) -> int:
        """Return the bytes of `tokens` tokens in plain 16-bit caches."""
        return sum(shape.plain.held(tokens) for shape in self.shapes)

    @property
    def promised(self) -> int:
        return _together(list(self._promised.values()))

    @property
    def free_bytes(self) -> int:
        """Return the bytes available for stored sessions."""
        return max(0, self.bound - self.promised)

    def promise(self, key: Hashable, tokens: int, is_operator: bool = True) -> None:
        """Reserve memory for a request. Raises Refused, with the numbers, if it does not fit. is_operator: whether to
        include other clients' reservations, which reveal the lengths of their requests."""
        own, alike = self._needs(tokens)
        if _together([*self._promised.values(), (own, alike)]) > self.bound:
            raise self._refusal(tokens, own + alike, is_operator)
        self._promised[key] = own, alike

    def _refusal(self, tokens: int, need: int, is_operator: bool) -> Refused:
        bound, promised = human_bytes(self.bound), self.promised
        details = {"tokens": tokens, "need_bytes": need, "kv_memory_bytes": self.bound}
        words = f"[--kv-memory] {tokens} tokens need {human_bytes(need)} of cache"
        if need > self.bound:
            words += f", the reply included; the bound is {bound}; ask for fewer tokens, or start the server with more"
            return Refused(503, words, "kv_memory", details=details)
        share = "too much"
        if is_operator:
            share, details["promised_bytes"] = human_bytes(promised), promised
        words += f"; {share} of {bound} is promised to other requests; try again later"
        return Refused(503, words, "kv_memory_busy", retry=2, details=details)

    def _needs(self, tokens: int) -> tuple[int, int]:
        """Return the maximum bytes of a sequence: (own size, part padded to the longest)."""
        own, alike = (
            sum(shape.allocated(tokens, self.chunk, most=True, padded=padded) for shape in shapes)
            for shapes, padded in ((self._own, False), (self._alike, True))
        )
        return own, alike

    def longest(self, limit: int, beside: bool = False) -> int:
        """Return the longest request, up to `limit` tokens, that `promise` accepts. beside: given current reservations,
        else with none. For any thread."""
        others = list(self._promised.values()) if beside else []
        return bisect_right(
            range(1, limit + 1),
            self.bound,
            key=lambda tokens: _together([*others, self._needs(tokens)]),
        )

    def release(self, key: Hashable) -> None:
        """Release the reservation of a request, if any."""
        self._promised.pop(key, None)

    def release_all(self) -> None:
        self._promised.clear()


def _together(needs: list[tuple[int, int]]) -> int:
    return sum(own for own, _ in needs) + len(needs) * max((alike for _, alike in needs), default=0)
