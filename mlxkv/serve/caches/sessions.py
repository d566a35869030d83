"""Caches of finished prompts and replies, found by their tokens: in memory up to a bound, behind it on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy

from mlx_lm.models.cache import KVCache, can_trim_prompt_cache

from mlxkv.models.trimming import trim_caches
from mlxkv.serve.caches.block_store import BlockStore
from mlxkv.serve.caches.disk import Disk, KeptSession, nearest, replaced
from mlxkv.serve.caches.memory import Memory


class Sessions:
    """Caches of finished prompts and replies, by the tenant whose they are.

    memory: has the room for them. new: makes an empty cache. disk: takes those that have no room, if
    not None. reuse: whether any are kept. agree: turns this process's bytes into a number that is the
    same in every process of the model. entries: the least recently used first. counts: since the start.
    For the generation thread; others may read numbers.
    """

    def __init__(
        self,
        memory: Memory,
        new: Callable[[], list],
        disk: Disk | None = None,
        reuse: bool = True,
        agree: Callable[[int], int] = int,
    ):
        self.memory, self.new, self.disk, self.reuse = memory, new, disk, reuse
        self.agree = agree
        self.block_store = BlockStore()
        self.entries: list[KeptSession] = []
        self.counts = Counter(lookups=0, hits=0, tokens=0, tokens_found=0, evicted=0)

    def fetch(self, tokens: list[int], tenant: str = "") -> tuple[list, int]:
        """Return a cache that holds a start of `tokens`, and how many: none, perhaps, and never all of them, since
        the model has to read one."""
        cache, count = self._nearest(tokens, tenant)
        if self.disk is not None:
            session, shared = self.disk.nearest(tokens, tenant)
            if session is not None and min(shared, len(tokens) - 1) > count:
                loaded, before = self.disk.load(session), count
                if loaded is not None:
                    self._insert(session.tokens, loaded, tenant)
                    cache, count = self._nearest(tokens, tenant)
                    session.trims = session.trims and count > before
        cache = self.new() if cache is None else cache
        for layer in cache:
            if type(layer) is KVCache and layer.keys is not None and layer.values is not None:
                layer.keys = layer.keys[:, :, : layer.offset]  # its trim frees nothing
                layer.values = layer.values[:, :, : layer.offset]
        self.counts.update(lookups=1, hits=int(count > 0), tokens=len(tokens), tokens_found=count)
        self.shrink()
        return cache, count

    def _nearest(self, tokens: list[int], tenant: str) -> tuple[list | None, int]:
        """Return a working cache of a start of `tokens`, and how many of them it holds; (None, 0) if none does."""
        for shared, session in nearest(self.entries, tokens, tenant):
            cache, count = deepcopy(session.cache), min(shared, len(tokens) - 1)
            if trim_caches(cache, len(session.tokens), count):
                self.entries.remove(session)
                self.entries.append(session)
                return cache, count
            session.trims = False
        return None, 0

    def keep(self, tokens: list[int], cache: list, tenant: str = "") -> None:
        """Keep a cache, and take it over: parts that others have, too, are stored once."""
        if self.reuse:
            self._insert(tokens, cache, tenant)
            self.shrink()

    def _insert(self, tokens: list[int], cache: list, tenant: str) -> None:
        self.block_store.put(tokens, cache, tenant)
        trims, size = can_trim_prompt_cache(cache), sum(layer.nbytes for layer in cache)
        session = KeptSession(tokens, tenant, trims, size, cache=cache)
        needless = replaced(self.entries, session)
        self.entries = [*(each for each in self.entries if each not in needless), session]

    @property
    def nbytes(self) -> int:
        """Their size; shared parts count once."""
        return self.bytes_apart - self.block_store.saved

    @property
    def bytes_apart(self) -> int:
        """Their size if each had its own copy."""
        return sum(session.nbytes for session in list(self.entries))

    def shrink(self, limit: int | None = None) -> None:
        """Evict the least recently used until the rest fits into `limit` bytes (default: the memory's)."""
        limit = self.memory.free_bytes if limit is None else limit
        while self.entries and self.agree(self.nbytes) > limit:
            session = self.entries.pop(0)
            self.counts["evicted"] += 1
            if self.disk is not None:  # a copy is whole, without shared parts
                self.disk.save(session.tokens, deepcopy(session.cache), session.tenant)
            del session  # frees its shared parts before the next look at the size

    def forget(self) -> None:
        """Drop everything; files stay."""
        self.entries.clear()

    def close(self) -> None:
        """Evict everything to disk, if there is one, and let others have it."""
        self.shrink(-1)
        if self.disk is not None:
            self.disk.close()
