"""What the caches of a request will take, before it runs, and what is promised to requests."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache

from mlxkv import pool, ragged
from mlxkv.cache import STEP, CompressedKVCache
from mlxkv.config import CacheConfig
from mlxkv.console import human_bytes
from mlxkv.pages import GROWTH
from mlxkv.serve.refusals import Refused


@dataclass(frozen=True)
class CacheShape:
    """What one cache takes: `fixed` bytes, and for each token `full` bytes in full precision, 16-bit
    `half` bytes; of at most `window` tokens, if any. rotates: whether its room ends there, too.
    config: how it compresses, or None."""

    fixed: int = 0
    full: int = 0
    half: int = 0
    window: int = 0
    rotates: bool = False
    config: CacheConfig | None = None
    page_bytes: float = 0.0  # of one page, codes and scales
    together: bool = False  # batches decode in arrays of all
    bases: int = 0  # bytes of bases that follow the text

    def bytes(self, tokens: int, chunk: int, padded: bool = False) -> int:
        """At most, spare room included. chunk: tokens of a prompt that are read at once, which a
        window holds besides, for a while. padded: beside others in one of mlx-lm's own batches."""
        if self.config is None:
            return self.fixed + self.full * self._room(tokens, chunk, padded)
        c = self.config
        pages = max(0, tokens - c.sink) // c.page  # where it was cut back, up to its last tokens
        if self.together:
            held = ragged.window_tokens(c)
            return int(pool.most(pages) * self.page_bytes) + self.full * held
        windows = -(-(tokens + tokens // GROWTH) // STEP) * STEP
        exact = min(c.sink + c.recent + c.page, windows)
        kept = int((pages + pages // GROWTH) * self.page_bytes)
        return kept + self.full * exact + self.bases

    def bytes_fp16(self, tokens: int) -> int:
        """What mlx-lm's plain cache takes in 16 bits, which grows by whole steps, too."""
        grown = -(-tokens // STEP) * STEP
        return self.fixed + self.half * (min(grown, self.window) if self.window else grown)

    def _room(self, tokens: int, chunk: int, padded: bool) -> int:
        """Tokens that mlx-lm's plain cache has room for, at most. It grows by whole steps, not from
        a whole step but from wherever it is."""
        if padded:  # to the longest of what others read at the same time
            tokens += min(chunk, tokens)
        if not self.window:
            return tokens + STEP - 1
        if not self.rotates:
            return min(tokens, self.window + chunk) + STEP - 1
        if padded:  # as long as a batch runs, its window fills up whoever is in it
            return self.window + min(chunk, tokens)
        return min(tokens + STEP - 1, self.window) + chunk * (self.window < tokens)


def shapes_of(caches: list) -> list[CacheShape]:
    """Of caches that hold one token; those inside mlx-lm's CacheList too."""
    out = []
    for cache in caches:
        inner = getattr(cache, "caches", None)
        out += shapes_of(inner) if inner else [_shape(cache)]
    return out


def _shape(cache) -> CacheShape:
    if isinstance(cache, CompressedKVCache):
        pair = cache.keys_and_values()[0].live
        values = sum(x.shape[1] * x.shape[3] for x in pair)
        # All pages: tokens are dropped when a prompt has been read, none of the reply.
        config, dims = cache.config, tuple(x.shape[3] for x in pair)
        packed = config.page * values * replace(config, keep=1.0).bits_per_value(*dims) / 8
        each, together = pair[0].dtype.size, ragged.why_not(cache) is None
        bases = config.basis_bytes(pair[0].shape[1], *dims)
        return CacheShape(0, each * values, 2 * values, 0, False, config, packed, together, bases)
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    if not isinstance(keys, mx.array) or keys.ndim != 4:
        return CacheShape(fixed=cache.nbytes)
    count = sum(x.shape[1] * x.shape[3] for x in (keys, values))
    rotates = bool(getattr(cache, "max_size", None))
    window = cache.max_size if rotates else getattr(cache, "chunk_size", None) or 0
    return CacheShape(0, keys.dtype.size * count, 2 * count, window, rotates)


def cut_padding(caches: list) -> None:
    """Drop what is padding in every row of mlx-lm's batched caches, which would else grow by a chunk of
    the longest prompt at every end of a shorter one."""
    for cache in caches:
        cut_padding(getattr(cache, "caches", ()))
        if isinstance(cache, BatchKVCache) and not cache.empty():
            padding = cache.left_padding.tolist()
            if min(padding) > 0:
                cache.filter(list(range(len(padding))))


class Memory:
    """A bound for all caches: those in use, as promised, and those kept for later.

    batched: whether requests run in batches. Used by the generation thread alone; others read numbers.
    """

    def __init__(self, bound: int, shapes: list[CacheShape], chunk: int, batched: bool = False):
        self.bound, self.shapes, self.chunk = bound, shapes, chunk
        # In mlx-lm's own batches every sequence takes what the longest takes.
        alike = [batched and s.full > 0 and s.config is None for s in shapes]
        self._alike = [s for s, padded in zip(shapes, alike, strict=True) if padded]
        self._own = [s for s, padded in zip(shapes, alike, strict=True) if not padded]
        self._promised: dict[int, tuple[int, int]] = {}  # bytes: its own, of those that are alike

    def need(self, tokens: int) -> int:
        """Bytes of one sequence of so many tokens that runs alone, at most."""
        return sum(shape.bytes(tokens, self.chunk) for shape in self.shapes)

    def fp16(self, tokens: int) -> int:
        """Bytes of one sequence of so many tokens in plain 16-bit caches."""
        return sum(shape.bytes_fp16(tokens) for shape in self.shapes)

    @property
    def promised(self) -> int:
        return _together(list(self._promised.values()))

    @property
    def room(self) -> int:
        """For caches that are kept for later."""
        return max(0, self.bound - self.promised)

    def promise(self, key: int, tokens: int) -> None:
        """Set memory aside for a request. Raises Refused with the numbers, where it cannot fit."""
        own = sum(shape.bytes(tokens, self.chunk) for shape in self._own)
        alike = sum(shape.bytes(tokens, self.chunk, padded=True) for shape in self._alike)
        need, promised = own + alike, self.promised
        details = {"tokens": tokens, "need_bytes": need, "kv_memory_bytes": self.bound}
        words = f"{tokens} tokens need {human_bytes(need)} of cache"
        if need > self.bound:
            raise Refused(
                503,
                f"[--kv-memory] {words}, the reply included; the bound is {human_bytes(self.bound)}; "
                "ask for fewer tokens, or start the server with more",
                "kv_memory",
                details=details,
            )
        if _together([*self._promised.values(), (own, alike)]) > self.bound:
            raise Refused(
                503,
                f"[--kv-memory] {words}; {human_bytes(promised)} of {human_bytes(self.bound)} are "
                "promised to other requests; try again when they are done",
                "kv_memory_busy",
                retry=2,
                details=details | {"promised_bytes": promised},
            )
        self._promised[key] = own, alike

    def release(self, key: int) -> None:
        """The request is over."""
        self._promised.pop(key, None)


def _together(needs: list[tuple[int, int]]) -> int:
    return sum(own for own, _ in needs) + len(needs) * max((alike for _, alike in needs), default=0)
