"""Texts that have been read, so that the questions of several parts need one prefill per arm."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from mlxkv.eval import feed

KEEP = 2**30  # bytes of caches that may wait here; reading again gives the same


class Prefixes:
    """Caches of the texts that were read last, oldest first."""

    def __init__(self, keep: int = KEEP):
        self.keep = keep
        self._held: OrderedDict[tuple, list] = OrderedDict()

    def read(self, loaded, name: str, tokens: Sequence[int]) -> list:
        """A cache that holds `tokens`, of the arm `name` which is attached to `loaded`. It may be
        handed out again: only write into a `feed.branch` of it."""
        key = (name, *tokens)
        cache = self._held.pop(key, None) or feed.prefill(loaded, tokens)
        self._held[key] = cache
        while self._held and sum(map(_bytes, self._held.values())) > self.keep:
            self._held.popitem(last=False)
        return cache


def _bytes(cache: list) -> int:
    return sum(layer.nbytes for layer in cache)
