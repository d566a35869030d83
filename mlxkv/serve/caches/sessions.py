"""mlx-lm's prompt cache with a bound in bytes, and a disk behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy

from mlx_lm.models.cache import KVCache, LRUPromptCache

from mlxkv.models.taking_back import cut_back
from mlxkv.serve.caches.disk import Disk
from mlxkv.serve.caches.memory import Memory
from mlxkv.serve.caches.shelf import Shelf

MANY = 1 << 62  # sequences, bytes: mlx-lm's bounds are not used


class Owned(list):
    """The caches of one sequence, a layer each. tenant: whose they are."""

    def __init__(self, caches: Iterable, tenant: str):
        super().__init__(caches)
        self.tenant = tenant


class Sessions(LRUPromptCache):
    """Caches of finished prompts and replies, found by their tokens, by the tenant whose they are.

    tenant: of the next look-up; mlx-lm's loop does not hand it on. Caches that come to stay are `Owned`.
    memory: has the room for them. new: makes an empty cache. disk: takes those that have no room, if
    not None. reuse: whether any are kept. agree: turns this process's bytes into a number that is the
    same in every process of the model. For the generation thread; others may read numbers.
    """

    def __init__(
        self,
        memory: Memory,
        new: Callable[[], list],
        disk: Disk | None = None,
        reuse: bool = True,
        agree: Callable[[int], int] = int,
    ):
        super().__init__(MANY, MANY)
        self.memory, self.new, self.disk, self.reuse = memory, new, disk, reuse
        self.agree = agree
        self.tenant = ""
        self.shelf = Shelf()
        # Of the tokens that are held, without room to grow; the same in plain 16-bit caches.
        self.bytes_in_use = self.bytes_fp16 = 0
        self._useless: set = set()  # files whose caches cannot be trimmed to a shared start
        self.lookups = self.hits = self.tokens = self.tokens_found = self.evicted = 0

    def fetch_nearest_cache(self, model, tokens: list[int]):
        """Return a cache that holds the start of `tokens`, possibly empty, and the rest of the tokens: at
        least one, which the model has to read."""
        own = model, self.tenant
        cache, found = self._nearest(own, tokens)
        if self.disk is not None:
            entry, shared = self.disk.nearest(tokens, self.tenant)
            if min(shared, len(tokens) - 1) > found and self._from_disk(own, entry):
                before, (cache, found) = found, self._nearest(own, tokens)
                if found == before:  # it cannot be cut back to the shared start
                    self._useless.add(entry.path)
        rest = tokens[found:]
        if cache is None:
            cache = self.new()
        for layer in cache:
            if type(layer) is KVCache and layer.keys is not None:  # its trim frees nothing
                layer.keys = layer.keys[:, :, : layer.offset]
                layer.values = layer.values[:, :, : layer.offset]
        self.lookups += 1
        self.hits += len(rest) < len(tokens)
        self.tokens += len(tokens)
        self.tokens_found += len(tokens) - len(rest)
        self.shrink()
        return Owned(cache, self.tenant), rest

    def _nearest(self, own: tuple, tokens: list[int]) -> tuple[list | None, int]:
        """A working cache of the start of `tokens`, and how many of them it holds; (None, 0) if none does."""
        near, last = self._trie.search(own, tokens), len(tokens) - 1
        whole = near.exact if near.exact is not None else near.longer
        short = 0 if near.shorter is None else len(near.shorter)
        shared = len(tokens) if near.exact is not None else near.common_prefix
        if whole is not None and shared > short:
            cache = deepcopy(self._trie.get(near.model, whole).prompt_cache)
            kept = min(shared, last)
            if kept > short and cut_back(cache, len(whole), kept):
                return cache, kept
        if not short:
            return None, 0
        return deepcopy(self._trie.get(near.model, near.shorter).prompt_cache), short

    def _from_disk(self, own: tuple, entry) -> bool:
        cache = None if entry.path in self._useless else self.disk.load(entry)
        if cache is None:
            return False
        self._insert(own, entry.tokens, cache)
        return True

    def insert_cache(self, model, tokens: list[int], prompt_cache: list, **kwargs) -> None:
        """Keep a cache, and take it over: parts that others have, too, are stored once."""
        if self.reuse:
            own = model, getattr(prompt_cache, "tenant", "")
            self._insert(own, tokens, prompt_cache, **kwargs)
            self.shrink()

    def _insert(self, own: tuple, tokens: list[int], prompt_cache: list, **kwargs) -> None:
        self.shelf.put(tokens, prompt_cache, own[1])
        super().insert_cache(own, tokens, prompt_cache, **kwargs)

    @property
    def nbytes(self) -> int:
        """Their size; shared parts count once."""
        return self.bytes_apart - self.shelf.saved

    @property
    def bytes_apart(self) -> int:
        """Their size if each had its own copy."""
        return self._n_bytes

    def shrink(self, room: int | None = None) -> None:
        """Evict the least recently used until the rest fits into `room` bytes (default: the memory's)."""
        room = self.memory.room if room is None else room
        while len(self) and self.agree(self.nbytes) > room:
            own, tokens = self._lru.pop()
            entry = self._trie.pop(own, tokens)
            if not self._trie._trie[own]:  # there may be any number of tenants
                del self._trie._trie[own]
            self._n_bytes -= entry.nbytes
            self._n_bytes_by_type[entry.cache_type] -= entry.nbytes
            self.evicted += 1
            if self.disk is not None:
                self.disk.save(
                    list(tokens), deepcopy(entry.prompt_cache), own[1]
                )  # a copy is whole, without shared parts
            del entry  # frees its shared parts before the next look at the size
        kept = [len(tokens) for lru in self._lru._lrus.values() for _, tokens in lru]
        self.bytes_in_use = sum(self.memory.in_use(count, rests=True) for count in kept)
        self.bytes_fp16 = sum(map(self.memory.fp16, kept))

    def forget(self) -> None:
        """Evict everything, without saving it; files stay."""
        disk, self.disk = self.disk, None
        self.shrink(-1)
        self.disk = disk

    def close(self) -> None:
        """Evict everything to disk, if there is one, and let others have it."""
        self.shrink(-1)
        if self.disk is not None:
            self.disk.close()
