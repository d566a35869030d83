"""`BatchedKVCache`: the compressed caches of several sequences as one, for mlx-lm's batches.

Lengths may differ without padding. A decode step scatters the new tokens of all sequences at once
and attends to all in one dispatch (`Ragged`). Where that cannot be, each sequence is a cache of its
own, and attention goes through them one after the other: while prompts are read, without kernels, for
caches that observe queries. One sequence never changes the output of another.

mlx-lm pads prompts of one step on the right (`prepare`): padding is not stored, and the output of
attention for it is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache
from typing import TYPE_CHECKING

import mlx.core as mx

from mlxkv.cache.attention import DECODE_TOKENS
from mlxkv.cache.contract import Contract
from mlxkv.cache.ragged import Ragged
from mlxkv.cache.view import OPS, BatchView
from mlxkv.errors import UserError

if TYPE_CHECKING:
    from mlxkv.cache.compressed import CompressedKVCache


class BatchedKVCache(Contract):
    """Caches of one layer, each of a batch of 1."""

    def __init__(self, rows: Sequence[CompressedKVCache]):
        self._rows = list(rows)
        self._ragged: Ragged | None = None  # while there is one, `_rows` is empty
        self._left: list[int] | None = None  # tokens to come before padding starts
        self._new: list[int] | None = None  # of the last step, without padding

    @property
    def rows(self) -> list[CompressedKVCache]:
        """The sequences, each as a cache of its own until they are decoded together again."""
        if self._ragged is not None:
            self._rows = [self._alone(i) for i in range(len(self.offsets))]
            self._ragged = None
        return self._rows

    @property
    def ragged(self) -> Ragged | None:
        """The shared arrays of all sequences, while there are any."""
        return self._ragged

    @property
    def is_padded(self) -> bool:
        """Whether padding may come with the next tokens."""
        return self._left is not None

    @property
    def together(self) -> bool:
        """Whether the last tokens of all sequences went into shared arrays."""
        return self._ragged is not None

    @property
    def offsets(self) -> list[int]:
        """Tokens read by each sequence."""
        if self._ragged is not None:
            return self._ragged.offsets
        return [row.offset for row in self._rows]

    @property
    def offset(self) -> mx.array:
        """[B] tokens read by each sequence: where the positions of the next ones start."""
        return _offsets(*self.offsets)

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        """Append keys, values: [B, G, L, D] without the padding; returns the view twice."""
        if keys.shape[0] != len(self.offsets):
            raise UserError(
                f"[BatchedKVCache] the cache holds a batch of {len(self.offsets)}; got {keys.shape[0]}"
            )
        self._new = None
        if self._left is None and keys.shape[2] <= DECODE_TOKENS and self._joins(keys, values):
            view = self._ragged.append(keys, values)
            return view, view
        rows, counts = [], self._unpadded(keys.shape[2])
        for i, (row, n) in enumerate(zip(self.rows, counts, strict=True)):
            new = (x[i : i + 1, :, :n] for x in (keys, values))
            rows.append((row.update_and_fetch(*new)[0], n) if n else None)
        view = BatchView(tuple(rows))
        return view, view

    def _unpadded(self, new: int) -> list[int]:
        """How many of the next `new` tokens of each sequence are no padding."""
        counts = [new] * len(self.offsets)
        if self._left is not None:
            counts = [min(new, left) for left in self._left]
            self._left = [left - n for left, n in zip(self._left, counts, strict=True)]
        self._new = counts
        return counts

    def _joins(self, keys: mx.array, values: mx.array) -> bool:
        """Whether the sequences are in shared arrays, now if not before."""
        if self._ragged is not None:
            return True
        rows = self.rows
        if len(rows) < 2 or any(row.observes for row in rows):  # one alone has nothing to join
            return False
        chosen = rows[0].plan((keys.shape[3], values.shape[3]), keys.dtype)
        if chosen.body == OPS:
            return False
        held = [row.contents() for row in rows]
        self._ragged = Ragged.of(held, chosen, keys.shape[1], keys.dtype)
        if self._ragged is not None:
            self._kind, self._rows = type(rows[0]), []
        return self._ragged is not None

    def _alone(self, i: int) -> CompressedKVCache:
        """A sequence of the shared arrays as a cache of its own, independent of them."""
        return self._kind.from_contents(self._ragged.contents(i))

    def keys_and_values(self):
        """The view without appending anything (mlx-lm 0.32)."""
        if self._ragged is not None:
            view = self._ragged.view()
        else:
            counts = self._new or [None] * len(self.offsets)
            views = (row.keys_and_values()[0] for row in self._rows)
            view = BatchView(
                tuple((v, n) if n != 0 else None for v, n in zip(views, counts, strict=True))
            )
        return view, view

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """None, "causal" or a boolean [B, 1, N, tokens of the longest + N], where the columns of a
        sequence are its tokens from the first one on."""
        if self._ragged is None and any(row.config.sliding for row in self._rows):
            own = [row.make_mask(N, return_array, window_size) for row in self._rows]
            if not any(isinstance(one, mx.array) for one in own):
                return own[0]
            return _stacked([row.seen(N, window_size) for row in self._rows])
        if window_size is None and (N == 1 or not return_array):
            return None if N == 1 else "causal"
        if self._ragged is not None:
            return _masks(self.offset[:, None, None, None], N, self.size() + N, window_size)
        return _stacked([row.make_mask(N, True, window_size) for row in self._rows])

    # -- mlx-lm's contract for batches

    @classmethod
    def merge(cls, caches: Sequence[CompressedKVCache]) -> BatchedKVCache:
        """The caches as one batch, which is independent of them."""
        return cls([deepcopy(cache) for cache in caches])  # each alone: one may be there twice

    def extract(self, idx: int) -> CompressedKVCache:
        """The cache of one sequence, independent of this one."""
        if self._ragged is None:
            return deepcopy(self._rows[idx])
        out = self._alone(range(len(self.offsets))[idx])
        # Or it would hold the shared arrays, which then could not be written in place.
        mx.async_eval(out.arrays())
        return out

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep these sequences, in this order; one that is named twice becomes two."""
        keep = (
            batch_indices.tolist() if isinstance(batch_indices, mx.array) else list(batch_indices)
        )
        self._new = None
        if self._ragged is not None and len(set(keep)) == len(keep) > 0:
            self._ragged.select(keep)
        else:
            rows = self.rows
            self._rows = [
                deepcopy(rows[i]) if i in keep[:n] else rows[i] for n, i in enumerate(keep)
            ]
            self._ragged = None

    def extend(self, other: BatchedKVCache) -> None:
        """Add the sequences of another batch, which must not be used again."""
        self._new = None
        rows, joined = other.rows, False
        if self._ragged is not None and not any(row.observes for row in rows):
            joined = self._ragged.join([row.contents() for row in rows])
        if not joined:
            self._rows = self.rows + rows

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce the next tokens, up to `finalize`: `lengths` of each sequence, then padding."""
        if left_padding is not None and any(left_padding):
            raise UserError("[BatchedKVCache] prompts are padded on the right; got left_padding")
        if right_padding is not None and any(right_padding):
            if lengths is None:
                raise UserError("[BatchedKVCache] right_padding needs lengths; got none")
            self._left = list(lengths)

    def finalize(self) -> None:
        """The padded tokens have all been read."""
        self._left = self._new = None

    # -- what it shares with the cache of one sequence

    def is_trimmable(self) -> bool:
        return self._ragged is not None or all(row.is_trimmable() for row in self._rows)

    def trim(self, n: int) -> int:
        """Drop the last n tokens of every sequence, at most what the shortest one has. Raises UserError,
        and changes nothing, where a sequence cannot take them back without loss."""
        n = min([n, *self.offsets])
        if self._ragged is None or not self._ragged.trim(n):
            rows = self.rows
            for row in sorted(rows, key=lambda row: row.keeps(row.offset - n)):  # refusals first
                row.trim(n)
        return n

    def size(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.offsets, default=0)

    def empty(self) -> bool:
        return self._ragged is None and all(row.empty() for row in self._rows)

    @property
    def nbytes(self) -> int:
        if self._ragged is not None:
            return sum(x.nbytes for x in self._ragged.arrays())
        return sum(row.nbytes for row in self._rows)

    def __reduce__(self):
        rows = [self.extract(i) for i in range(len(self.offsets))]
        return type(self), (rows,), {"_left": self._left, "_new": self._new}

    @property
    def state(self) -> list:
        """The arrays to evaluate; sequences are saved one by one (`extract`)."""
        if self._ragged is not None:
            return self._ragged.arrays()
        return [row.arrays() for row in self._rows]


@lru_cache(maxsize=64)
def _offsets(*values: int) -> mx.array:
    """[B] int32; every layer of a step asks for the same."""
    return mx.array(values, mx.int32)


def _stacked(masks: list[mx.array]) -> mx.array:
    """Masks [N, T] of each sequence as one, [B, 1, N, longest T]."""
    width = max(mask.shape[1] for mask in masks)
    return mx.stack([mx.pad(m, [(0, 0), (0, width - m.shape[1])])[None] for m in masks])


def _masks(offsets: mx.array, new: int, width: int, window: int | None) -> mx.array:
    """As `make_mask`, offsets: [B, 1, 1, 1]."""
    rows, columns = offsets + mx.arange(new)[:, None], mx.arange(width)
    mask = rows >= columns
    return mask if window is None else mask & (rows < columns + window)
