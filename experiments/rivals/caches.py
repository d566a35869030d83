"""A plain cache whose older tokens are coded and decoded in place, as pages of a compressed cache are read."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from experiments.rivals.coders import Coder
from mlxkv.spec.affine import split


class Lossy(KVCache):
    """Full precision in memory, with the errors of two coders in the tokens that windows no longer hold.

    keys, values: the coders. sink, recent, page: as in `CacheConfig`; pages are coded as a compressed cache seals them.
    """

    def __init__(self, coders: tuple[Coder, Coder], sink: int, recent: int, page: int):
        super().__init__()
        self.coders, self.windows, self.done = coders, (sink, recent, page), 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Code what leaves the windows, and return everything as it was before this call coded it."""
        read = super().update_and_fetch(keys, values)
        sink, pages = split(self.offset, *self.windows)
        start, stop = sink + self.done, sink + pages * self.windows[2]
        if stop > start:
            for name, coder in zip(("keys", "values"), self.coders, strict=True):
                whole = getattr(self, name)
                found = coder.code(whole[..., start:stop, :]).astype(whole.dtype)
                # A new array: what was read may be this very one.
                new = mx.slice_update(whole, found, mx.array([start]), axes=(2,))
                setattr(self, name, new)
            self.done = stop - sink
        return read
