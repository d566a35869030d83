"""Caches at rest: sessions that begin with the same tokens store that beginning once.

A compressed cache is stored as its sink, blocks of quantized pages, and the rest. A block is stored once
for all sessions that have the same tokens up to its end, and the same bytes in it. This is exact:
quantized pages never change.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, cast
from weakref import WeakValueDictionary, finalize

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlxkv.cache.compressed import CompressedKVCache

BLOCK = 256  # tokens, in whole pages


class Block:
    """Arrays that sessions may share, by their names in a cache's state. users: how many do."""

    def __init__(self, arrays: dict[str, mx.array]):
        self.arrays = arrays
        self.nbytes = sum(x.nbytes for x in arrays.values())
        self.users = 0


class StoredCache:
    """The cache of one layer at rest. Its deep copy, which mlx-lm's prompt cache makes to use an entry, is
    a working cache again.

    blocks: in the order of their tokens. rest: the state without them. tokens: how many it holds.
    """

    def __init__(self, blocks: Sequence[Block], rest: dict, tokens: int):
        self._blocks, self._rest, self._tokens = blocks, rest, tokens
        own = sum(x.nbytes for _, x in _flat(rest))
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
        for name, x in _flat(self._rest.get("pages", {})):
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
        """Replace compressed caches, which hold a start of `tokens`, by `StoredCache` ones in place, layer by layer:
        only one layer has two copies at a time. tenant: shares with its own sessions alone."""
        for layer, cache in enumerate(caches):
            if type(cache) is CompressedKVCache and not cache.empty():
                caches[layer] = self._stored((tenant, layer), tokens, cache)

    def _stored(self, place: tuple, tokens: list[int], cache: CompressedKVCache) -> StoredCache:
        state, config = cache.state, cache.config
        state.pop("last", None)  # its codes are as good for who uses this cache again
        paged = [(f"pages.{name}", x) for name, x in _flat(state.pop("pages", {}))]
        sink = [(f"sink.{name}", x) for name, x in _flat(state.pop("sink", {}))]
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


def _flat(tree: Any) -> list[tuple[str, mx.array]]:
    # By mlx's stub it may be a dict, too: where one was given to be filled.
    return cast(list[tuple[str, mx.array]], tree_flatten(tree))


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
