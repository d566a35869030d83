"""The memory of a model's caches: reservations of requests, and sessions in the rest of it. Sessions are caches of
finished prompts and replies, found by their tokens, in memory up to a limit, beyond it on disk. Those that begin with
the same tokens store that beginning once.

Files have the format of `mlxkv.generate.prompt_cache`: written atomically, private, and checked on reading. A damaged
file, or one of another model, preset or version, is ignored: its session is lost, but no start or request fails.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast
from weakref import WeakValueDictionary, finalize

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map, tree_unflatten
from mlx_lm.models.cache import BatchKVCache, KVCache, can_trim_prompt_cache

from mlxkv import files
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.console import human_bytes
from mlxkv.errors import UserError
from mlxkv.formats.session import ENDING as SUFFIX
from mlxkv.formats.sizes import CacheShape
from mlxkv.generate import prompt_cache
from mlxkv.generate.usage import shape_of
from mlxkv.machine import footprint
from mlxkv.patching.trees import flat, leaves, trim_caches
from mlxkv.serve.ranks import Ranks
from mlxkv.serve.refusals import Refused

BLOCK = 256  # tokens, in whole pages
WHERE = "--kv-disk"


# -- the memory of all caches: what each request needs, computed before it runs, and what is reserved


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


# -- sessions


@dataclass(eq=False)
class StoredSession:
    """A stored cache. tokens: its tokens. tenant: its owner. trims: whether it can be trimmed to a prefix. cache, path:
    where it is, in memory or on disk."""

    tokens: list[int]
    tenant: str
    trims: bool
    nbytes: int
    cache: list = field(default_factory=list)
    path: Path = Path()

    def __post_init__(self):
        self._ids = np.array(self.tokens, np.int64)

    def shared(self, ids: np.ndarray) -> int:
        """Return the length of the common prefix."""
        count = min(len(ids), len(self._ids))
        differ = np.flatnonzero(ids[:count] != self._ids[:count])
        return int(differ[0]) if differ.size else count


def nearest(
    sessions: list[StoredSession], tokens: list[int], tenant: str
) -> list[tuple[int, StoredSession]]:
    """Return (length of the common prefix with `tokens`, session) for the tenant's sessions, the longest first. A
    session that cannot be trimmed must be a proper prefix: the model has to read at least one token."""
    ids = np.array(tokens, np.int64)
    pairs = [(each.shared(ids), each) for each in sessions if each.tenant == tenant]
    usable = [
        (count, each)
        for count, each in pairs
        if count and (each.trims or count == len(each.tokens) < len(tokens))
    ]
    return sorted(usable, key=lambda pair: (-pair[0], len(pair[1].tokens)))


def replaced(sessions: list[StoredSession], new: StoredSession) -> list[StoredSession]:
    """Return the sessions made redundant by `new`: equal ones, and its prefixes if it can be trimmed to them."""
    ids = np.array(new.tokens, np.int64)
    starts = [x for x in sessions if x.tenant == new.tenant and x.shared(ids) == len(x.tokens)]
    return starts if new.trims else [x for x in starts if len(x.tokens) == len(ids)]


class Sessions:
    """Caches of finished prompts and replies, by tenant.

    memory: bounds their bytes. new: makes an empty cache. disk: receives evicted sessions, if not None. reuse: whether
    to store any. agree: maps this process's bytes to a number equal in every process of the model.
    entries: the least recently used first. pinned: packs, for all tenants, never evicted. counts: since the start.
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
        self.entries: list[StoredSession] = []
        self.pinned: list[StoredSession] = []
        self.counts = Counter(lookups=0, hits=0, tokens=0, tokens_found=0, evicted=0)

    def fetch(self, tokens: list[int], tenant: str = "") -> tuple[list, int]:
        """Return a cache of a prefix of `tokens`, and its length: possibly 0, and never all of them, since the model
        has to read at least one."""
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
                layer.keys = layer.keys[:, :, : layer.offset]  # its trim frees no memory
                layer.values = layer.values[:, :, : layer.offset]
        self.counts.update(lookups=1, hits=int(count > 0), tokens=len(tokens), tokens_found=count)
        self.shrink()
        return cache, count

    def _nearest(self, tokens: list[int], tenant: str) -> tuple[list | None, int]:
        """Return a working cache of a prefix of `tokens`, and its length; (None, 0) if there is none."""
        found = [*nearest(self.entries, tokens, tenant), *nearest(self.pinned, tokens, "")]
        for shared, session in sorted(found, key=lambda pair: -pair[0]):
            cache, count = deepcopy(session.cache), min(shared, len(tokens) - 1)
            if trim_caches(cache, len(session.tokens), count):
                if session in self.entries:
                    self.entries.remove(session)
                    self.entries.append(session)
                return cache, count
            session.trims = False
        return None, 0

    def keep(self, tokens: list[int], cache: list, tenant: str = "") -> None:
        """Store a cache and take ownership of it; parts shared with other sessions are stored once."""
        if self.reuse:
            self._insert(tokens, cache, tenant)
            self.shrink()

    def _insert(self, tokens: list[int], cache: list, tenant: str) -> None:
        self.block_store.put(tokens, cache, tenant)
        trims, size = can_trim_prompt_cache(cache), sum(layer.nbytes for layer in cache)
        session = StoredSession(tokens, tenant, trims, size, cache=cache)
        needless = replaced(self.entries, session)
        self.entries = [*(each for each in self.entries if each not in needless), session]

    def pin(self, tokens: list[int], cache: list) -> None:
        """Store a pack, whose bytes are taken from the memory of requests and sessions."""
        self.block_store.put(tokens, cache)
        trims, size = can_trim_prompt_cache(cache), sum(layer.nbytes for layer in cache)
        self.pinned.append(StoredSession(tokens, "", trims, size, cache=cache))
        self.memory.bound -= size

    @property
    def nbytes(self) -> int:
        """Return the bytes of all sessions; shared parts count once."""
        return self.bytes_apart - self.block_store.saved

    @property
    def bytes_apart(self) -> int:
        """Return the bytes if each session had its own copy."""
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
        """Drop all sessions in memory, and packs, whose texts are read again; files stay."""
        self.entries.clear()
        self.memory.bound += sum(session.nbytes for session in self.pinned)
        self.pinned.clear()

    def close(self) -> None:
        """Evict all sessions to disk, if there is one, and unlock its folder."""
        self.shrink(-1)
        if self.disk is not None:
            self.disk.close()


# -- blocks that sessions share
#
# A compressed cache is stored as its sink, blocks of quantized pages, and the rest. A block is stored once for all
# sessions that have the same tokens up to its end, and the same bytes in it: quantized pages never change.


class Block:
    """Arrays that sessions may share, by their names in a cache's state. users: number of sessions with it."""

    def __init__(self, arrays: dict[str, mx.array]):
        self.arrays = arrays
        self.nbytes = sum(x.nbytes for x in arrays.values())
        self.users = 0


class StoredCache:
    """The stored cache of one layer. Its deep copy is a working cache again.

    blocks: in the order of their tokens. rest: the state without them. tokens: their number.
    """

    def __init__(self, blocks: Sequence[Block], rest: dict, tokens: int):
        self._blocks, self._rest, self._tokens = blocks, rest, tokens
        own = sum(x.nbytes for _, x in flat(rest))
        self.nbytes = own + sum(block.nbytes for block in blocks)

    def is_trimmable(self) -> bool:
        return True

    def size(self) -> int:
        return self._tokens

    def __deepcopy__(self, memo) -> CompressedKVCache:
        runs: dict[str, list[mx.array]] = {}
        for block in self._blocks:
            for name, x in block.arrays.items():
                runs.setdefault(name, []).append(x)
        for name, x in flat(self._rest.get("pages", {})):
            runs.setdefault(f"pages.{name}", []).append(x)
        joined = [(name, mx.concatenate(run, axis=2)) for name, run in runs.items()]
        whole = {name: x for name, x in self._rest.items() if name != "pages"}
        return CompressedKVCache.from_state(whole | dict(tree_unflatten(joined)))


class BlockStore:
    """Stores the caches of sessions. saved: bytes that separate copies would take in addition."""

    def __init__(self):
        self._blocks: WeakValueDictionary[tuple, Block] = WeakValueDictionary()
        self.saved = 0

    def put(self, tokens: list[int], caches: list, tenant: str = "") -> None:
        """Replace compressed caches of a prefix of `tokens` by `StoredCache`s in place, layer by layer: only one layer
        has two copies at a time. tenant: only its own sessions share blocks."""
        for layer, cache in enumerate(caches):
            if type(cache) is CompressedKVCache and not cache.empty():
                caches[layer] = self._stored((tenant, layer), tokens, cache)

    def _stored(self, place: tuple, tokens: list[int], cache: CompressedKVCache) -> StoredCache:
        state, config = cache.state, cache.config
        state.pop("last", None)  # a reused cache can do with the codes
        paged = [(f"pages.{name}", x) for name, x in flat(state.pop("pages", {}))]
        sink = [(f"sink.{name}", x) for name, x in flat(state.pop("sink", {}))]
        start = sink[0][1].shape[2] if sink else 0
        recent_count = state["live"]["keys"].shape[2]
        pages = (cache.size() - start - recent_count) // config.page
        each = max(1, BLOCK // config.page)
        found, ends = [dict(sink)] if sink else [], [start] if sink else []
        for first in range(0, pages - each + 1, each):
            found.append({n: _rows(x, first, first + each, pages) for n, x in paged})
            ends.append(start + (first + each) * config.page)
        rest = [(n, _rows(x, pages - pages % each, pages, pages)) for n, x in paged]
        if pages % each:
            state |= dict(tree_unflatten(rest))
        blocks = self._shared(list(zip(_keys(place, tokens, ends), found, strict=True)))
        state = tree_map(_own, state)
        mx.eval(state, [block.arrays for block in blocks])
        kept = StoredCache(blocks, state, cache.size())
        for block in blocks:
            self.saved += block.nbytes if block.users else 0
            block.users += 1
        finalize(kept, self._gone, blocks)
        return kept

    def _shared(self, parts: list[tuple[tuple, dict[str, mx.array]]]) -> list[Block]:
        """Return a block for each part: a stored one where the bytes are the same, else a new one."""
        known = [self._blocks.get(key) for key, _ in parts]
        same = [
            block is not None and _equal(block.arrays, arrays)
            for block, (_, arrays) in zip(known, parts, strict=True)
        ]
        mx.eval(same)
        out = []
        for block, equal, (key, arrays) in zip(known, same, parts, strict=True):
            if not bool(equal):
                block = Block({name: _own(x) for name, x in arrays.items()})
                self._blocks.setdefault(key, block)
            out.append(block)
        return out

    def _gone(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.users -= 1
            self.saved -= block.nbytes if block.users else 0


def _keys(place: tuple, tokens: list[int], ends: list[int]) -> Iterator[tuple]:
    """Yield a key for each end: a digest of all tokens before it."""
    digest, start = hashlib.sha256(), 0
    for end in ends:
        digest.update(array("Q", tokens[start:end]).tobytes())
        start = end
        yield place, end, digest.digest()


def _rows(x: mx.array, first: int, last: int, pages: int) -> mx.array:
    """Return the rows of pages first .. last - 1. x: [B, G, rows of all pages, W]."""
    rows = x.shape[2] // pages
    return x[:, :, first * rows : last * rows]


def _equal(a: dict[str, mx.array], b: dict[str, mx.array]) -> mx.array | bool:
    if a.keys() != b.keys() or any(x.dtype != b[name].dtype for name, x in a.items()):
        return False
    # As integers, where a NaN equals itself.
    pairs = [(x.view(mx.uint8), b[name].view(mx.uint8)) for name, x in a.items()]
    return mx.all(mx.stack([mx.array_equal(x, y) for x, y in pairs]))


def _own(x: mx.array) -> mx.array:
    """Return a copy, which does not keep a larger array alive as a slice does."""
    flat = x.reshape(-1)
    half = flat.size // 2
    return mx.concatenate([flat[:half], flat[half:]]).reshape(x.shape)


# -- on disk


class Disk:
    """Files of one model and preset in a folder below `base`, at most `limit` bytes in total: the least recently
    used are removed first. loaded: the model. ranks: each of several processes has its own folder, and a session is
    used only if every process has its file. Raises UserError if the folder is not writable, is writable by other
    users, or is in use by another process.

    saved, found, failed: counts. entries: the least recently used first. close: unlocks the folder.
    """

    def __init__(self, base: Path, limit: int, loaded, ranks: Ranks | None = None):
        self.limit, self.loaded, self._ranks = limit, loaded, ranks or Ranks()
        self.saved = self.found = self.failed = 0
        os.close(files.own_folder(base, WHERE))
        if self._ranks.many:
            base = base / f"{self._ranks.rank + 1}-of-{self._ranks.size}"
            os.close(files.own_folder(base, WHERE))
        lm = version("mlx-lm").split(".")[:2]
        self.folder = base / _digest([loaded.fingerprint, loaded.kv.as_dict(), lm])
        self._handle = files.own_folder(self.folder, WHERE)
        self.close = finalize(self, os.close, self._handle)
        self._lock()
        self.entries = self._scan()
        self._bound()

    def _lock(self) -> None:
        """Lock out other servers: they would not count these files, and would remove drafts as stale."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UserError(
                f"[{WHERE}] another server keeps its sessions there; got {str(self.folder)!r}; wait "
                "until it has ended, or choose another folder"
            ) from None
        except OSError:
            pass  # a file system without locks

    def _scan(self) -> list[StoredSession]:
        """Read the headers of all files, the oldest first. Removes drafts of servers that were killed while
        saving."""
        dated = []
        for name in os.listdir(self._handle):
            is_draft = name.startswith(".") and name.endswith((files.DRAFT, SUFFIX))
            if is_draft:
                self._remove(name)
            elif name.endswith(SUFFIX):
                with suppress(OSError):
                    about = os.stat(name, dir_fd=self._handle, follow_symlinks=False)
                    dated.append((about.st_mtime, name, about.st_size))
        entries = []
        for _, name, size in sorted(dated):
            path = self.folder / name
            try:
                tokens, trims = prompt_cache.about(path)
            except Exception as error:  # no damaged file prevents a start
                self.failed += 1
                logging.warning(f"a session cannot be read, it is left alone: {error}")
                continue
            tenant = path.stem.rpartition("-")[0]
            entries.append(StoredSession(tokens, tenant, trims, size, path=path))
        return entries

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in list(self.entries))

    def save(self, tokens: list[int], cache: list, tenant: str = "") -> None:
        """Write a cache. One that cannot be written is lost, and logged."""
        name = f"{tenant}-{_digest(tokens)}" if tenant else _digest(tokens)
        path = self.folder / (name + SUFFIX)
        known = next((entry for entry in self.entries if entry.path == path), None)
        if known is not None:
            self._touch(known)
            return
        saved = prompt_cache.Saved(cache, tokens, messages=[], text="", raw=True)
        try:
            with files.written(path, self._handle) as file:
                prompt_cache.write_session(file, saved, self.loaded)
                size = os.fstat(file.fileno()).st_size
        except (OSError, RuntimeError) as error:
            self.failed += 1
            logging.warning(f"a session could not be kept: {error}")
            return
        self.saved += 1
        entry = StoredSession(tokens, tenant, can_trim_prompt_cache(cache), size, path=path)
        self._drop(replaced(self.entries, entry))
        self.entries.append(entry)
        self._bound()

    def _touch(self, entry: StoredSession) -> None:
        self.entries.remove(entry)
        self.entries.append(entry)
        with suppress(OSError):  # only the order after a restart is lost
            os.utime(entry.path.name, dir_fd=self._handle, follow_symlinks=False)

    def _drop(self, entries: list[StoredSession]) -> None:
        for entry in entries:
            self.entries.remove(entry)
            self._remove(entry.path.name)

    def _remove(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self._handle)
        except FileNotFoundError:
            pass
        except OSError as error:  # the folder is read-only now, or this is one
            logging.warning(f"{name!r} could not be removed: {error}")

    def _bound(self) -> None:
        while self.entries and self.nbytes > self.limit:
            self._drop(self.entries[:1])

    def nearest(self, tokens: list[int], tenant: str = "") -> tuple[StoredSession | None, int]:
        """Return the tenant's file with the longest common prefix with `tokens`, and the length of that prefix."""
        shared, entry = next(iter(nearest(self.entries, tokens, tenant)), (0, None))
        choice: list[Any] = [entry and entry.path.name, shared]
        name, shared = self._ranks.share(choice)
        entry = next((each for each in self.entries if each.path.name == name), None)
        if self._ranks.all_min(entry is not None):
            return entry, shared
        self._drop([entry] if entry is not None else [])
        return None, 0

    def load(self, entry: StoredSession) -> list | None:
        """Read a cache. A file that cannot be used is removed: then the result is None."""
        cache = None
        try:
            saved = prompt_cache.read_session(entry.path, self.loaded, follow=False)
            if saved.tokens != entry.tokens:
                raise UserError(f"[load] {str(entry.path)!r} was replaced by another session")
            cache = saved.cache
        except Exception as error:  # on any error the prompt is read again
            self.failed += 1
            logging.warning(f"a session could not be used, it is removed: {error}")
        if not self._ranks.all_min(cache is not None) or cache is None:
            self._drop([entry])
            return None
        self.found += 1
        entry.trims = can_trim_prompt_cache(cache)  # files of earlier versions lack it
        self._touch(entry)
        return cache


def _digest(data: list) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:32]
