"""`BatchedKVCache`: the compressed caches of several sequences as one, for mlx-lm's batches.

Lengths may differ without padding. A decode step scatters the new tokens of all sequences at once and attends to all in
one dispatch (`BatchBuffers`). Otherwise (during prefill, without kernels, for caches that observe queries) each
sequence has a separate cache, and attention processes them in turn. No sequence affects another's output.

mlx-lm pads prompts of one step on the right (`prepare`), mlx-vlm on the left (`pad`): padding is not
stored, and the output of attention for it is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

import mlx.core as mx

from mlxkv.cache.attention import DECODE_TOKENS
from mlxkv.cache.batch_buffers import BatchBuffers
from mlxkv.cache.contract import Contract, causal_mask
from mlxkv.cache.view import Pair, Row, RowsView, View
from mlxkv.errors import UserError
from mlxkv.formats.state import check_batch
from mlxkv.metal.launch import begin

if TYPE_CHECKING:
    from mlxkv.cache.compressed import CompressedKVCache

Batch = TypeVar("Batch", bound="BatchedKVCache")


class BatchedKVCache(Contract):
    """The caches of one layer, one per sequence."""

    def __init__(self, rows: Sequence[CompressedKVCache]):
        self._rows = list(rows)
        self._buffers: BatchBuffers | None = None  # `_rows` is empty while this is set
        self._text: list[int] | None = None  # remaining tokens before padding starts
        self._new: list[int] | None = None  # new tokens of the last step, without padding
        # Left padding of each prompt: total, if mask columns include it, and remaining.
        self._padding: list[int] | None = None
        self._ahead = [0] * len(self._rows)
        self._skips: list[int] | None = None  # left padding in the last step

    def pad(self, left_padding: Sequence[int] | mx.array) -> None:
        """Expect left padding of each sequence, as in mlx-vlm's batches, whose masks include its columns.

        Raises UserError if a sequence contains tokens.
        """
        padding = _integers(left_padding)
        if not any(padding):
            return
        if len(padding) != len(self.offsets) or any(self.offsets):
            raise UserError(
                "[BatchedKVCache] padding on the left comes before all tokens, for each sequence; got "
                f"left_padding {padding} for sequences of {self.offsets} tokens; pad on the right instead"
            )
        self._ahead = list(padding)
        self._padding = padding

    @property
    def rows(self) -> list[CompressedKVCache]:
        """Return the sequences as separate caches, until they are decoded together again."""
        if self._buffers is not None:
            self._rows = [self._buffers.row(i) for i in range(len(self.offsets))]
            self._buffers = None
        return self._rows

    @property
    def buffers(self) -> BatchBuffers | None:
        """The shared arrays of all sequences, or None."""
        return self._buffers

    @property
    def is_padded(self) -> bool:
        """Return whether the next tokens may include padding."""
        return self._text is not None or any(self._ahead)

    @property
    def offsets(self) -> list[int]:
        """Tokens read by each sequence."""
        if self._buffers is not None:
            return self._buffers.offsets
        return [row.offset for row in self._rows]

    @property
    def offset(self) -> mx.array:
        """Return the position of each sequence's next token, [B]; below 0 while left padding remains."""
        pairs = zip(self.offsets, self._ahead, strict=True)
        return _offsets(*(tokens - ahead for tokens, ahead in pairs))

    @property
    def batch_size(self) -> int:
        """Return the number of sequences."""
        return len(self.offsets)

    def is_single_row(self) -> bool:
        """Return whether there is only one sequence, `extract(0)` (mlx-vlm's prefix cache)."""
        return self.batch_size == 1

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        """Append keys, values: [B, G, L, D] without the padding; returns the view twice."""
        check_batch(self.batch_size, keys.shape[0], "BatchedKVCache")
        self._new = None
        joins = not self.is_padded and keys.shape[2] <= DECODE_TOKENS
        if joins and (buffers := self._join(keys, values)) is not None:
            view = buffers.append(keys, values)
            if self._padding is not None:
                view = replace(view, padding=tuple(self._padding))
            return view, view
        skips, counts = self._arriving(keys.shape[2])
        rows: list[Row] = []
        for i, (row, skip, n) in enumerate(zip(self.rows, skips, counts, strict=True)):
            new = (x[i : i + 1, :, skip : skip + n] for x in (keys, values))
            rows.append((row.update_and_fetch(*new)[0], n) if n else None)
        view = self._batch_view(rows, (keys[:, :, :0], values[:, :, :0]))
        return view, view

    @staticmethod
    def joined(views: Sequence[tuple[View, Any]]) -> tuple[View, Any]:
        """Join what `update_and_fetch` returned for each sequence, without padding, into what it returns for all."""
        view = RowsView(views[0][0].recent, rows=tuple((row, None) for row, _ in views))
        return view, view

    def _batch_view(self, rows: Sequence[Row], nothing: Pair | None = None) -> View:
        """Return the view of all sequences. nothing: keys and values of length zero, for a step that is all padding."""
        skips = self._skips if self._new is not None else None
        recent = next((row[0].recent for row in rows if row is not None), nothing)
        assert recent is not None  # layers that share a cache have tokens to read
        return RowsView(
            recent,
            rows=tuple(rows),
            skips=None if skips is None else tuple(skips),
            padding=None if self._padding is None else tuple(self._padding),
        )

    def _arriving(self, new: int) -> tuple[list[int], list[int]]:
        """Return, per sequence, how many of the `new` tokens are left padding, and how many are text."""
        skips = [min(new, ahead) for ahead in self._ahead]
        counts = [new - skip for skip in skips]
        if self._text is not None:
            counts = [min(n, text) for n, text in zip(counts, self._text, strict=True)]
            self._text = [text - n for text, n in zip(self._text, counts, strict=True)]
        self._ahead = [ahead - n for ahead, n in zip(self._ahead, skips, strict=True)]
        self._skips, self._new = skips, counts
        return skips, counts

    def _unpadded(self, new: int) -> list[int]:
        """Return, per sequence, how many of the next `new` tokens precede right padding."""
        skips, counts = self._arriving(new)
        if any(skips):
            raise UserError(
                f"[{type(self).__name__}] these caches take no padding on the left; got some; serve such "
                "prompts one at a time"
            )
        return counts

    def _join(self, keys: mx.array, values: mx.array) -> BatchBuffers | None:
        """Return the shared arrays of the sequences, made at the first call; None if they cannot share."""
        if self._buffers is not None:
            return self._buffers
        rows = self.rows
        # one alone has nothing to join
        if len(rows) < 2 or not all(row.shares_buffers for row in rows):
            return None
        plan = rows[0].plan((keys.shape[3], values.shape[3]), keys.dtype)
        if not plan.by_kernels:
            return None
        self._buffers = BatchBuffers.of(rows, plan, keys.shape[1], keys.dtype)
        if self._buffers is not None:
            self._rows = []
        return self._buffers

    def keys_and_values(self):
        """Return the view without appending anything (mlx-lm 0.32)."""
        if self._buffers is not None:
            view = self._buffers.view()
        else:
            counts = self._new or [None] * len(self.offsets)
            pairs = zip(self._rows, counts, strict=True)
            rows = [(row.keys_and_values()[0], n) if n != 0 else None for row, n in pairs]
            view = self._batch_view(rows)
        return view, view

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """Return None, "causal" or a boolean [B, 1, N, longest sequence + N].

        The columns of a sequence are its left padding, then its tokens.
        """
        if window_size is None and (N == 1 or not return_array):
            return None if N == 1 else "causal"
        if self._padding is not None:
            columns = mx.arange(self._columns + N)
            mask = causal_mask(self._columns, N, columns.size, window_size)
            return mask & (mx.array(self._padding)[:, None, None, None] <= columns)
        if self._buffers is not None:
            first = self.offset[:, None, None, None]
            return causal_mask(first, N, self.size() + N, window_size)
        masks = [row.make_mask(N, True, window_size) for row in self._rows]
        return _stacked(cast("list[mx.array]", masks))  # requested as arrays

    @property
    def _columns(self) -> int:
        """Return the mask columns so far, padding included."""
        padding = self._padding or [0] * len(self.offsets)
        parts = zip(self.offsets, padding, self._ahead, strict=True)
        return max((tokens + all_ - ahead for tokens, all_, ahead in parts), default=0)

    def _keep_padding(self, keep: Sequence[int]) -> None:
        """Select the padding of the sequences to keep. Columns that are padding for all of them are dropped."""
        if self._text is not None:
            self._text = [self._text[i] for i in keep]
        columns = 0 if self._padding is None else self._columns
        self._ahead = [self._ahead[i] for i in keep]
        if self._padding is None:
            return
        self._padding = [self._padding[i] for i in keep]
        spare = min([columns, *self._padding])
        self._padding = [n - spare for n in self._padding] if keep else None

    # -- mlx-lm's contract for batches

    @classmethod
    def merge(cls: type[Batch], caches: Sequence[CompressedKVCache]) -> Batch:
        """Return a batch of copies of the caches."""
        return cls([deepcopy(cache) for cache in caches])  # one by one: a cache may occur twice

    def extract(self, idx: int) -> CompressedKVCache:
        """Return an independent copy of one sequence's cache."""
        if self._buffers is None:
            return deepcopy(self._rows[idx])
        out = self._buffers.row(range(len(self.offsets))[idx])
        # Otherwise it would reference the shared arrays, which could not be written in place.
        begin(out.arrays())
        return out

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep these sequences, in this order; repeated indices make copies."""
        keep = _integers(batch_indices)
        self._new = None
        self._keep_padding(keep)
        if self._buffers is not None and len(set(keep)) == len(keep) > 0:
            self._buffers.select(keep)
        else:
            rows = self.rows
            self._rows = [
                deepcopy(rows[i]) if i in keep[:n] else rows[i] for n, i in enumerate(keep)
            ]
            self._buffers = None

    def extend(self, added: BatchedKVCache) -> None:
        """Add the sequences of `added`, which must not be used again."""
        self._new = self._padding = None
        rows, joined = added.rows, False
        if self._buffers is not None and all(row.shares_buffers for row in rows):
            joined = self._buffers.join(rows)
        if not joined:
            self._rows = self.rows + rows
        self._ahead = [0] * len(self.offsets)

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce the next tokens, up to `finalize`: `lengths` of each sequence, then padding."""
        if left_padding is not None:
            self.pad(left_padding)
        if right_padding is not None and any(right_padding):
            if lengths is None:
                raise UserError("[BatchedKVCache] right_padding needs lengths; got none")
            self._text = list(lengths)

    def finalize(self) -> None:
        """Note that the padded tokens have all been read."""
        self._text = self._new = None

    # -- what it shares with the cache of one sequence

    def is_trimmable(self) -> bool:
        return self._buffers is not None or all(row.is_trimmable() for row in self._rows)

    def trim(self, n: int) -> int:
        """Drop the last n tokens of every sequence, at most the length of the shortest.

        Raises UserError, without changes, if a sequence cannot be trimmed so.
        """
        n = min([n, *self.offsets])
        if self._buffers is None or not self._buffers.trim(n):
            rows = self.rows
            for row in rows:
                row.windows.trim(n)  # raises before anything has changed
            for row in rows:
                row.trim(n)
        return n

    def size(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.offsets, default=0)

    def empty(self) -> bool:
        return self._buffers is None and all(row.empty() for row in self._rows)

    @property
    def nbytes(self) -> int:
        if self._buffers is not None:
            return sum(x.nbytes for x in self._buffers.arrays())
        return sum(row.nbytes for row in self._rows)

    def __reduce__(self):
        rows = [self.extract(i) for i in range(len(self.offsets))]
        attributes = {
            name: getattr(self, name) for name in ("_text", "_new", "_padding", "_ahead", "_skips")
        }
        return type(self), (rows,), attributes

    @property
    def state(self) -> list[Any]:
        """Return the arrays to evaluate; sequences are saved one by one (`extract`)."""
        if self._buffers is not None:
            return self._buffers.arrays()
        return [row.arrays() for row in self._rows]


@lru_cache(maxsize=64)
def _offsets(*values: int) -> mx.array:
    """Return int32 [B], cached since every layer of a step needs the same."""
    return mx.array(values, mx.int32)


def _integers(x: Sequence[int] | mx.array) -> list[int]:
    return cast("list[int]", x.tolist()) if isinstance(x, mx.array) else list(x)


def _stacked(masks: list[mx.array]) -> mx.array:
    """Stack the masks [N, T] of sequences into one, [B, 1, N, longest T]."""
    width = max(mask.shape[1] for mask in masks)
    return mx.stack([mx.pad(m, [(0, 0), (0, width - m.shape[1])])[None] for m in masks])
