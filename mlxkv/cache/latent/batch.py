"""`BatchedLatentCache`: the latents of several sequences as one cache, for mlx-lm's batches.

Each sequence is a cache of its own. The model's code multiplies the rotary keys of all at once, so they come
back as one array, in which a shorter sequence ends in zeros; scores over these are not read.
"""

from __future__ import annotations

import mlx.core as mx

from mlxkv.cache.batch import BatchedKVCache
from mlxkv.cache.view import View
from mlxkv.errors import UserError


class BatchedLatentCache(BatchedKVCache):
    """Caches of latents of one layer, each of a batch of 1."""

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        """As `LatentKVCache.update_and_fetch`, for every sequence, without the padding: latents as a view or an
        array [B, 1, T, R], and rotary keys [B, 1, T, N]."""
        if keys.shape[0] != len(self.offsets):
            raise UserError(
                f"[BatchedLatentCache] the cache holds a batch of {len(self.offsets)}; got {keys.shape[0]}"
            )
        new, before = keys.shape[2], self.size()
        whole, latents, rotary = new > 1, [], []
        for i, (row, n) in enumerate(zip(self.rows, self._unpadded(new), strict=True)):
            if n:
                found = row.append(keys[i : i + 1, :, :n], values[i : i + 1, :, :n], whole)
                latents.append(found[0] if whole else (found[0], n))
                rotary.append(found[1])
            else:  # padding, which attention does not read
                latents.append(keys[:1, :, :0] if whole else None)
                rotary.append(values[:1, :, :0])
        width = (
            before + new if whole else self.size()
        )  # of the mask that was made, or of the longest
        rotary = mx.concatenate([_padded(x, width) for x in rotary])
        if not whole:
            live = next(row[0].live for row in latents if row is not None)
            return View(live, rows=tuple(latents)), rotary
        return mx.concatenate([_padded(x, width) for x in latents]), rotary

    def _joins(self, keys: mx.array, values: mx.array) -> bool:
        return False

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """As of BatchedKVCache; always an array for several tokens, which plain attention takes."""
        return super().make_mask(N, return_array or N > 1, window_size)


def _padded(x: mx.array, tokens: int) -> mx.array:
    """x: [1, 1, T, D] with zeros up to so many tokens."""
    return mx.pad(x, [(0, 0), (0, 0), (0, tokens - x.shape[2]), (0, 0)])
