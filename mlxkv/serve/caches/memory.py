"""Memory for caches: how much a request needs, known before it runs, and how much is promised."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache

from mlxkv.cache import ragged
from mlxkv.cache.attention import DECODE_TOKENS
from mlxkv.cache.compressed import STEP, CompressedKVCache
from mlxkv.cache.latent import LatentKVCache
from mlxkv.cache.pages import GROWTH, most
from mlxkv.console import human_bytes
from mlxkv.machine import footprint
from mlxkv.metal.lengths import grown
from mlxkv.models.usage import EXACT_BYTES, Sizes, sizes_of
from mlxkv.serve.refusals import Refused


def used_memory() -> int:
    """Bytes that this process takes: of MLX's arrays, or all of its own, whichever is more."""
    return max(mx.get_active_memory(), footprint())


@dataclass(frozen=True)
class CacheShape(Sizes):
    """Bytes that one layer's cache is allocated for. full: of a token in full precision. rotates: for no more than
    the window. together: sequences of a batch share arrays. room: of rotary keys beside latents, to grow, and of those
    in windows once more."""

    full: int = 0
    rotates: bool = False
    together: bool = False
    room: int = 0

    def bytes(self, tokens: int, chunk: int, padded: bool = False) -> int:
        """The most that a cache of so many tokens takes, spare room included.

        chunk: tokens of a prompt that are read at once; a window holds them for a while, too.
        padded: in one of mlx-lm's own batches, which pads to the longest sequence.
        """
        if self.config is None:
            return self.fixed + self.full * self._room(tokens, chunk, padded)
        c = self.config
        pages = max(0, tokens - c.sink) // c.page  # one that was trimmed may have no exact tokens
        if self.together:
            held = ragged.window_tokens(c)
            # One that runs alone grows as `grown` says, and several together fill up to such a number.
            return int(max(most(pages), grown(pages)) * self.page_bytes) + self.full * held
        windows = -(-(tokens + tokens // GROWTH) // STEP) * STEP
        exact = min(c.sink + c.recent + c.page, windows)
        kept = 0
        if pages:  # with the room that steps of fixed shapes take
            exact = c.sink + c.recent + 2 * c.page + DECODE_TOKENS
            kept = int(max(grown(pages), pages + pages // GROWTH) * self.page_bytes)
        return kept + self.full * (exact + c.pinned) + self.bases + self.room

    def _room(self, tokens: int, chunk: int, padded: bool) -> int:
        """The most tokens that mlx-lm's plain cache has room for. It grows in whole steps from any size."""
        if padded:  # as far as prompts that are read at the same time
            tokens += min(chunk, tokens)
        if not self.window:
            return tokens + STEP - 1
        if not self.rotates:
            return min(tokens, self.window + chunk) + STEP - 1
        if padded:  # the window of a batch fills up over all its sequences
            return self.window + min(chunk, tokens)
        return min(tokens + STEP - 1, self.window) + chunk * (self.window < tokens)


def shapes_of(caches: list) -> list[CacheShape]:
    """The shapes of caches that hold one token, those inside mlx-lm's CacheList included."""
    out = []
    for cache in caches:
        inner = getattr(cache, "caches", None)
        out += shapes_of(inner) if inner else [_shape(cache)]
    return out


def _shape(cache) -> CacheShape:
    sizes, extras = sizes_of(cache), {}
    if isinstance(cache, CompressedKVCache):
        extras = {"together": cache.joins}
        if isinstance(cache, LatentKVCache) and cache.config.rotary == 16:
            rotary = cache.live[1]
            extras["room"] = rotary.dtype.size * rotary.shape[3] * (cache.config.window + STEP)
    if sizes.half:
        keys = cache.live[0] if sizes.config else cache.keys
        extras["full"] = sizes.half * keys.dtype.size // EXACT_BYTES
    return CacheShape(**vars(sizes), **extras, rotates=bool(getattr(cache, "max_size", None)))


def cut_padding(caches: list) -> None:
    """Drop padding that all rows of mlx-lm's batched caches have: else they grow by a chunk of the longest
    prompt at the end of every shorter one."""
    for cache in caches:
        cut_padding(getattr(cache, "caches", ()))
        if isinstance(cache, BatchKVCache) and not cache.empty():
            padding = cache.left_padding.tolist()
            if min(padding) > 0:
                cache.filter(list(range(len(padding))))


class Memory:
    """A bound in bytes for all caches: promised to requests, or kept for later.

    chunk: tokens of a prompt that are read at once. batched: whether requests run in batches. For the
    generation thread; others may read numbers.
    """

    def __init__(self, bound: int, shapes: list[CacheShape], chunk: int, batched: bool = False):
        self.bound, self.shapes, self.chunk = bound, shapes, chunk
        # In mlx-lm's own batches every sequence is padded to the longest.
        alike = [batched and s.full > 0 and s.config is None for s in shapes]
        self._alike = [s for s, padded in zip(shapes, alike, strict=True) if padded]
        self._own = [s for s, padded in zip(shapes, alike, strict=True) if not padded]
        self._promised: dict[Hashable, tuple[int, int]] = {}  # bytes: of its own size, padded

    def need(self, tokens: int) -> int:
        """The most bytes of one sequence of so many tokens that runs alone."""
        return sum(shape.bytes(tokens, self.chunk) for shape in self.shapes)

    def in_use(self, tokens: int, rests: bool = False) -> int:
        """Bytes that one sequence of so many tokens takes, without room to grow. rests: on the shelf."""
        return sum(shape.in_use(tokens, rests) for shape in self.shapes)

    def fp16(self, tokens: int) -> int:
        """Bytes of the same tokens in plain 16-bit caches."""
        return sum(shape.bytes_fp16(tokens) for shape in self.shapes)

    @property
    def promised(self) -> int:
        return _together(list(self._promised.values()))

    @property
    def room(self) -> int:
        """Bytes for caches that are kept for later."""
        return max(0, self.bound - self.promised)

    def promise(self, key: Hashable, tokens: int) -> None:
        """Set memory aside for a request. Raises Refused, with the numbers, where it does not fit."""
        own, alike = self._needs(tokens)
        need, promised = own + alike, self.promised
        details = {"tokens": tokens, "need_bytes": need, "kv_memory_bytes": self.bound}
        words = f"[--kv-memory] {tokens} tokens need {human_bytes(need)} of cache"
        bound = human_bytes(self.bound)
        if need > self.bound:
            words += f", the reply included; the bound is {bound}; ask for fewer tokens, or start the server with more"
            raise Refused(503, words, "kv_memory", details=details)
        if _together([*self._promised.values(), (own, alike)]) > self.bound:
            words += f"; {human_bytes(promised)} of {bound} are promised to other requests; try again later"
            details["promised_bytes"] = promised
            raise Refused(503, words, "kv_memory_busy", retry=2, details=details)
        self._promised[key] = own, alike

    def _needs(self, tokens: int) -> tuple[int, int]:
        """The most bytes of a sequence: of its own size, padded."""
        own = sum(shape.bytes(tokens, self.chunk) for shape in self._own)
        return own, sum(shape.bytes(tokens, self.chunk, padded=True) for shape in self._alike)

    def longest(self, limit: int, beside: bool = False) -> int:
        """The most tokens, up to `limit`, that `promise` sets memory aside for. beside: beside what is promised
        already, else with nothing else under way. For any thread."""
        others = list(self._promised.values()) if beside else []
        return bisect_right(
            range(1, limit + 1),
            self.bound,
            key=lambda tokens: _together([*others, self._needs(tokens)]),
        )

    def release(self, key: Hashable) -> None:
        """Give the memory of a request back, if it has any."""
        self._promised.pop(key, None)

    def release_all(self) -> None:
        self._promised.clear()


def _together(needs: list[tuple[int, int]]) -> int:
    return sum(own for own, _ in needs) + len(needs) * max((alike for _, alike in needs), default=0)
