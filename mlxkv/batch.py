"""`BatchedKVCache`: the compressed caches of several sequences as one, for mlx-lm's batches.

Each sequence stays a cache of its own, so that lengths may differ without padding, pages stay
where they are when sequences join and leave, and every preset works as it does alone. Attention
goes through the sequences one by one.

mlx-lm pads prompts of one step on the right (`prepare`): what is padding is not stored, and what
attention gives out for it is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from mlxkv.attention import attend
from mlxkv.cache import CompressedKVCache, View
from mlxkv.errors import UserError


@dataclass(frozen=True)
class BatchView:
    """What attention reads of each sequence: its view and how many of the new tokens are its own;
    None where all are padding."""

    rows: tuple[tuple[View, int] | None, ...]

    @property
    def _first(self) -> View:
        return next(row[0] for row in self.rows if row is not None)

    @property
    def tokens(self) -> int:
        """Of the longest sequence."""
        return max(row[0].tokens for row in self.rows if row is not None)

    @property
    def dtype(self) -> mx.Dtype:
        """Of the keys, for models that read it."""
        return self._first.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[B, G, T, D] of the keys, for models that read it."""
        _, heads, _, dims = self._first.shape
        return len(self.rows), heads, self.tokens, dims

    def __getattr__(self, name):
        return View.__getattr__(self, name)  # the same words for the same misuse


class BatchedKVCache:
    """Caches of one layer, each of a batch of 1. `merge` of mlx-lm's contract makes it."""

    def __init__(self, rows: Sequence[CompressedKVCache]):
        self.rows = list(rows)
        self._left: list[int] | None = None  # tokens to come before padding starts

    @property
    def offset(self) -> mx.array:
        """[B] tokens read by each sequence: where the positions of the next ones start."""
        return _offsets(*(row.offset for row in self.rows))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[BatchView, BatchView]:
        """Append keys, values: [B, G, L, D], without what is padding; what to attend to, twice."""
        if keys.shape[0] != len(self.rows):
            raise UserError(
                f"[BatchedKVCache] the cache holds a batch of {len(self.rows)}; got {keys.shape[0]}"
            )
        counts = [keys.shape[2]] * len(self.rows)
        if self._left is not None:
            counts = [min(keys.shape[2], left) for left in self._left]
            self._left = [left - n for left, n in zip(self._left, counts, strict=True)]
        rows = []
        for i, (row, n) in enumerate(zip(self.rows, counts, strict=True)):
            new = (x[i : i + 1, :, :n] for x in (keys, values))
            rows.append((row.update_and_fetch(*new)[0], n) if n else None)
        view = BatchView(tuple(rows))
        return view, view

    def keys_and_values(self) -> tuple[BatchView, BatchView]:
        """The view without appending anything (mlx-lm 0.32)."""
        view = BatchView(tuple((row.keys_and_values()[0], 0) for row in self.rows))
        return view, view

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """None, "causal" or a boolean [B, 1, N, tokens of the longest + N], where the columns of a
        sequence are its tokens from the first one on."""
        if window_size is None and (N == 1 or not return_array):
            return None if N == 1 else "causal"
        masks = [row.make_mask(N, True, window_size) for row in self.rows]
        width = max(mask.shape[1] for mask in masks)
        return mx.stack([mx.pad(m, [(0, 0), (0, width - m.shape[1])])[None] for m in masks])

    # -- mlx-lm's contract for batches

    @classmethod
    def merge(cls, caches: Sequence[CompressedKVCache]) -> BatchedKVCache:
        """The caches as one batch; they may be used on without touching it."""
        return cls(deepcopy(list(caches)))

    def extract(self, idx: int) -> CompressedKVCache:
        """The cache of one sequence, independent of this one."""
        return deepcopy(self.rows[idx])

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep these sequences, in this order."""
        keep = batch_indices.tolist() if isinstance(batch_indices, mx.array) else batch_indices
        self.rows = [self.rows[i] for i in keep]

    def extend(self, other: BatchedKVCache) -> None:
        """Add the sequences of another batch, which is used up."""
        self.rows += other.rows

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce what the next tokens are, up to `finalize`: `lengths` of each sequence, then
        padding."""
        if left_padding is not None and any(left_padding):
            raise UserError("[BatchedKVCache] prompts are padded on the right; got left_padding")
        if right_padding is not None and any(right_padding):
            if lengths is None:
                raise UserError("[BatchedKVCache] right_padding needs lengths; got none")
            self._left = list(lengths)

    def finalize(self) -> None:
        """The padded tokens have all been read."""
        self._left = None

    # -- what it shares with the cache of one sequence

    def is_trimmable(self) -> bool:
        return all(row.is_trimmable() for row in self.rows)

    def trim(self, n: int) -> int:
        """Drop the last n tokens of every sequence, at most what the shortest one has."""
        n = min([n, *(row.offset for row in self.rows)])
        for row in self.rows:
            row.trim(n)
        return n

    def size(self) -> int:
        """Tokens of the longest sequence."""
        return max((row.size() for row in self.rows), default=0)

    def empty(self) -> bool:
        return all(row.empty() for row in self.rows)

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    @property
    def state(self) -> list:
        """What there is to evaluate; it is sequences that are saved (`extract`)."""
        return [row._arrays() for row in self.rows]


@lru_cache(maxsize=64)
def _offsets(*values: int) -> mx.array:
    """[B] int32; all layers of a step ask for the same."""
    return mx.array(values, mx.int32)


def attend_batch(
    queries: mx.array,
    view: BatchView,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """`attend` for every sequence. queries: [B, H, L, D] -> [B, H, L, Dv].

    mask: None, "causal", or an array that `BatchedKVCache.make_mask` made.
    """
    if isinstance(mask, mx.array) and (mask.ndim != 4 or mask.shape[-1] < view.tokens):
        raise UserError(
            f"[attach] this model's mask does not fit a batch; got shape {list(mask.shape)} for "
            f"{view.tokens} tokens; serve its requests one at a time"
        )
    new, out = queries.shape[2], []
    for i, row in enumerate(view.rows):
        if row is None:
            out.append(None)
            continue
        one, n = row
        part = mask
        if isinstance(mask, mx.array):
            part = mask[min(i, mask.shape[0] - 1)][None, :, :n, : one.tokens]
        elif n == 1:
            part = None
        got = attend(queries[i : i + 1, :, :n], one, scale, part, sinks)
        out.append(got if n == new else mx.pad(got, [(0, 0), (0, 0), (0, new - n), (0, 0)]))
    dims = next(x.shape[3] for x in out if x is not None)
    nothing = mx.zeros((1, queries.shape[1], new, dims), queries.dtype)
    return mx.concatenate([nothing if x is None else x for x in out])
