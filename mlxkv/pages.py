"""The sealed pages of one side: named arrays that grow by a sixteenth, so that long contexts are
rarely copied."""

from __future__ import annotations

import mlx.core as mx

from mlxkv.codec import Stored

GROWTH = 16  # spare room is at most 1/16 of what is stored


class Pages:
    """Encoded pages of keys or of values.

    Every array has the tokens (or groups of tokens) of all pages on axis 2, a fixed number of rows
    per page.
    """

    def __init__(self):
        self.count = 0
        self.capacity = 0
        self._arrays: Stored = {}

    def append(self, encoded: Stored, count: int) -> None:
        """Add `count` pages, as `Codec.encode` returned them."""
        if self.count + count > self.capacity:
            self._grow(encoded, count)
        else:
            for name, x in encoded.items():
                rows = x.shape[2] // count
                self._arrays[name][:, :, self.count * rows : (self.count + count) * rows] = x
        self.count += count

    def _grow(self, encoded: Stored, count: int) -> None:
        """Larger arrays with `encoded` in them. Only the spare room is filled with zeros."""
        spare = max(0, self.count // GROWTH - count)
        for name, x in encoded.items():
            rows = x.shape[2] // count
            parts = [x]
            if self.count:
                parts.insert(0, self._arrays[name][:, :, : self.count * rows])
            if spare:
                parts.append(mx.zeros((*x.shape[:2], spare * rows, x.shape[3]), x.dtype))
            self._arrays[name] = x if len(parts) == 1 else mx.concatenate(parts, axis=2)
        self.capacity = self.count + count + spare

    def read(self, start: int = 0, stop: int | None = None) -> Stored:
        """The arrays of pages start .. stop - 1 (all that are stored by default)."""
        stop = self.count if stop is None else stop
        out = {}
        for name, x in self._arrays.items():
            rows = x.shape[2] // self.capacity
            whole = start == 0 and stop == self.capacity
            out[name] = x if whole else x[:, :, start * rows : stop * rows]
        return out

    def truncate(self, count: int) -> None:
        """Keep the first `count` pages; more spare room than growing leaves is given back."""
        kept = self.read(0, count) if self.capacity - count > count // GROWTH else None
        self.count = count
        if kept is not None:
            self.restore(kept if count else {}, count)

    def restore(self, arrays: Stored, count: int) -> None:
        """Take over the arrays of exactly `count` pages."""
        for name, x in arrays.items():
            if x.shape[2] % count:
                raise ValueError(f"{x.shape[2]} rows of {name} in {count} pages")
        # New handles: writing into an mx.array in place is seen by all who hold the same one.
        self._arrays = {name: mx.contiguous(x) for name, x in arrays.items()}
        self.count = self.capacity = count

    def arrays(self) -> list[mx.array]:
        """What is allocated, spare room included."""
        return list(self._arrays.values())
