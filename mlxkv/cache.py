"""`CompressedKVCache`: sink | pages | recent, speaking mlx-lm's cache contract.

    tokens:  [ sink: full precision ][ page ] ... [ page ][ live: full precision ]

`live` holds everything until it is full; then the sink moves out and the oldest pages are encoded
and sealed. A sealed token has no full-precision copy. Works with both contracts of the pinned range
of mlx-lm (0.31: `meta_state`; 0.32: not).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np

from mlxkv import calibrated
from mlxkv.calibrated import Rotations
from mlxkv.config import CacheConfig
from mlxkv.errors import UserError
from mlxkv.pages import GROWTH
from mlxkv.sealed import CodePages, Codes, RecordPages, Records, store

STATE_VERSION = 2
STEP = 256  # the live window grows by whole steps, as mlx-lm's own cache does
Pair = tuple[mx.array, mx.array]


@dataclass(frozen=True)
class View:
    """What attention reads, as it was after one update. Stands where mlx-lm's models expect keys
    and values.

    live, sink: (keys, values), each [B, G, T, D]. pages: between the two, or None.
    plain: nothing has been sealed yet, so results have to equal a plain cache's.
    sealed: arrays that this update wrote, to be computed before attention.
    buffers: the arrays that hold live, spare room included; kernels take them whole, uncopied.
    heard: called with (queries, what attention gave out, scale, mask) by attention, gives out the same.
    """

    live: Pair
    sink: Pair | None = None
    pages: CodePages | RecordPages | None = None
    plain: bool = False
    sealed: tuple[mx.array, ...] = field(default=(), repr=False)
    buffers: Pair | None = field(default=None, repr=False)
    heard: Callable[..., mx.array] | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        sink = self.sink[0].shape[2] if self.sink else 0
        pages = self.pages.tokens if self.pages else 0
        return sink + pages + self.live[0].shape[2]

    @property
    def dtype(self) -> mx.Dtype:
        """Of the keys, for models that read it."""
        return self.live[0].dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[B, G, T, D] of the keys, for models that read it."""
        batch, heads, _, dims = self.live[0].shape
        return batch, heads, self.tokens, dims

    def __getattr__(self, name):
        if name.startswith("__"):  # protocols that Python itself looks for
            raise AttributeError(name)
        raise UserError(
            f"[attach] this model's code uses compressed keys as an array; got .{name}; "
            "choose --kv fp16 for this model"
        )


class CompressedKVCache:
    """The KV cache of one layer, compressed as `config` says. Keys and values: [B, G, L, D].

    rotations: of this layer, for a calibrated `config`.
    """

    def __init__(self, config: CacheConfig, rotations: Rotations | None = None):
        if config.calibrated and rotations is None:
            raise UserError(
                "[CompressedKVCache] this configuration needs the rotations of a calibration; got "
                "none; attach it to a model, or choose a preset without calibration"
            )
        self.config = config
        self.rotations = rotations if config.calibrated else None
        self._followed: int | None = 0  # when `_follow_weights` looked last; None: from a state
        self._clear()

    def _clear(self):
        self.offset = 0
        self._live: Pair | None = None  # buffers; `_count` tokens are in use
        self._count = 0
        self._sink: Pair | None = None
        self._store: Codes | Records | None = None

    @property
    def _stored(self) -> CacheConfig:
        """What is left to do to what a model hands over."""
        folded = self.rotations is not None and self.rotations.folded
        return self.config.folded if folded else self.config

    def _follow_weights(self) -> None:
        """Bring the values of the windows to where the model's weights leave values now. Pages hold
        the same codes either way."""
        before = self.rotations
        if before is None or self._followed == calibrated.changes():
            return
        now = calibrated.as_attached(before, loaded=self._followed is None)
        self._followed = calibrated.changes()
        if now is before:
            return
        self.rotations = now
        turn = now.values.store if now.folded else now.values.restore
        for name in ("_live", "_sink"):
            if (pair := getattr(self, name)) is not None:
                setattr(self, name, (pair[0], turn(pair[1]).astype(pair[1].dtype)))
        if (old := self._store) is not None:
            self._store = self._new_store(old.dims, self._live[0].dtype)
            self._store.restore(old.state, old.count)

    # -- reading and writing
    # ------------------------------------------------------------------------------------------

    @property
    def _paged(self) -> int:
        """Tokens in sealed pages."""
        return self._count_pages * self.config.page

    @property
    def _count_pages(self) -> int:
        return self._store.count if self._store else 0

    @property
    def _room(self) -> int:
        """Tokens that `live` may hold before pages have to be sealed."""
        limit = self.config.recent + self.config.page
        return limit if self._sink is not None or not self.config.sink else limit + self.config.sink

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[View, View]:
        """Append keys, values: [B, G, L, D] and return what attention has to read, twice (mlx-lm
        unpacks a pair).

        The view holds the new tokens exactly, also when they are sealed by this very call.
        """
        self._follow_weights()
        new = (keys, values)
        self._check_batch(keys)
        if self._count + keys.shape[2] <= self._room:
            self._append(new)
            view = self._view(self._read_live(), self._sink, self._count_pages, self._live)
        else:
            if self._count:
                new = tuple(
                    mx.concatenate(pair, axis=2)
                    for pair in zip(self._read_live(), new, strict=True)
                )
            sink, count = self._sink, self._count_pages
            self._seal(new)
            # The pages as they were, read from the arrays of now: a hold on those of before would
            # have all of them copied. Attention waits for the codes, so that these tokens are
            # freed before the next layer.
            view = replace(self._view(new, sink, count), sealed=self._arrays())
        self.offset += keys.shape[2]
        return view, view

    def _check_batch(self, keys: mx.array) -> None:
        if self._live is not None and self._live[0].shape[0] != keys.shape[0]:
            have, got = self._live[0].shape[0], keys.shape[0]
            raise UserError(f"[CompressedKVCache] the cache holds a batch of {have}; got {got}")
        if self._live is None and self.rotations is not None:
            self.rotations.check(keys.shape[1])

    def _new_store(self, dims: tuple[int, int], dtype: mx.Dtype):
        return store(self._stored, dims, dtype, self.rotations)

    def _read_live(self) -> Pair:
        if self._count == self._live[0].shape[2]:
            return self._live
        return tuple(x[:, :, : self._count] for x in self._live)

    def _append(self, new: Pair) -> None:
        end = self._count + new[0].shape[2]
        if self._live is None or end > self._live[0].shape[2]:
            spare = max(end, self._count + self._count // GROWTH)
            capacity = min(self._room, -(-spare // STEP) * STEP)
            grown = tuple(mx.zeros((*x.shape[:2], capacity, x.shape[3]), x.dtype) for x in new)
            if self._count:
                for buffer, old in zip(grown, self._read_live(), strict=True):
                    buffer[:, :, : self._count] = old
            self._live = grown
        for buffer, x in zip(self._live, new, strict=True):
            buffer[:, :, self._count : end] = x
        self._count = end

    def _seal(self, live: Pair) -> None:
        """Encode the oldest pages of `live`, which no longer fits, and keep the rest."""
        start = 0
        if self._sink is None and self.config.sink:
            start = self.config.sink
            self._sink = tuple(mx.contiguous(x[:, :, :start]) for x in live)
        size = self.config.page
        count = -(-(live[0].shape[2] - start - self._room) // size)
        if self._store is None:
            self._store = self._new_store(tuple(x.shape[3] for x in live), live[0].dtype)
        self._store.append(live, count, start)  # whole: kernels would copy slices
        self._live, self._count = None, 0
        self._append(tuple(x[:, :, start + count * size :] for x in live))

    def _view(self, live: Pair, sink: Pair | None, count: int, buffers: Pair | None = None) -> View:
        """Of `sink`, the first `count` pages and `live`."""
        if not count:
            return View(live, sink, plain=not self._count_pages)
        return View(live, sink, self._store.read(0, count), buffers=buffers)

    def keys_and_values(self) -> tuple[View, View]:
        """The view without appending anything (mlx-lm 0.32)."""
        view = self._view(self._read_live(), self._sink, self._count_pages, self._live)
        return view, view

    # -- the rest of mlx-lm's contract
    # --------------------------------------------------------------------------------

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Drop the last n tokens, return how many were dropped.

        Exact inside `live`. Further back whole pages go and the cut page is decoded into `live`.
        """
        n = max(0, min(self.offset, n))
        left = self.offset - n
        if n <= self._count:
            self._count -= n
            self.offset = left
            if not self._count and not self._paged and self._sink is None:
                self._clear()
            return n
        sink = self._sink[0].shape[2] if self._sink else 0
        dtype = self._live[0].dtype
        if left <= sink:  # only tokens of the sink are left: they are live again
            live = tuple(x[:, :, :left] for x in self._sink) if left else None
            self._clear()
        else:
            kept, cut = divmod(left - sink, self.config.page)
            live = None
            if cut:
                page = self._store.read(kept, kept + 1)
                live = tuple(page.decode(side, dtype)[:, :, :cut] for side in (0, 1))
            self._store.truncate(kept)
            self._count = 0
        if live is not None:
            self._live = None
            self._append(live)
        self.offset = left
        return n

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """None, "causal" or a boolean [N, offset + N], as mlx-lm's own cache answers."""
        if window_size is None and N == 1:
            return None
        if window_size is None and not return_array:
            return "causal"
        columns = mx.arange(self.offset + N)[None]
        rows = mx.arange(self.offset, self.offset + N)[:, None]
        mask = rows >= columns
        return mask if window_size is None else mask & (rows < columns + window_size)

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self._live is None

    def _arrays(self) -> tuple[mx.array, ...]:
        windows = [x for pair in (self._live, self._sink) if pair is not None for x in pair]
        return (*windows, *(self._store.arrays() if self._store else ()))

    @property
    def nbytes(self) -> int:
        """Allocated bytes: pages with their spare room, sink and live windows."""
        return sum(x.nbytes for x in self._arrays())

    @property
    def state(self) -> dict:
        """All that has to be saved, as a tree of arrays; the header is JSON in bytes, which both
        contracts carry."""
        header = {
            "version": STATE_VERSION,
            "config": self.config.as_dict(),
            "offset": self.offset,
            "pages": self._count_pages,
        }
        if self.rotations is not None:
            header["calibration"] = [self.rotations.digest, self.rotations.layer]
            header["folded"] = self.rotations.folded
        extra, more = self._extra()
        header |= extra
        tree: dict = {"header": mx.array(np.frombuffer(json.dumps(header).encode(), np.uint8))}
        if self._live is not None:
            tree["live"] = dict(zip(("keys", "values"), self._read_live(), strict=True))
        if self._sink is not None:
            tree["sink"] = dict(zip(("keys", "values"), self._sink, strict=True))
        if self._count_pages:
            tree["pages"] = self._store.state
        return tree | more

    def _extra(self) -> tuple[dict, dict]:
        """What a subclass saves besides: entries of the header, arrays."""
        return {}, {}

    def _restore_extra(self, header: dict, tree: dict) -> None:
        """The inverse, before pages are restored."""

    @state.setter
    def state(self, tree: dict) -> None:
        try:
            header = json.loads(bytes(np.array(tree["header"]).tobytes()))
            version = header["version"]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UserError(
                "[CompressedKVCache] not the state of a compressed cache; got no readable header"
            ) from None
        if version != STATE_VERSION:
            raise UserError(
                f"[CompressedKVCache] state of another format version; got {version}; "
                f"choose a file of version {STATE_VERSION}"
            )
        self.config = CacheConfig.from_dict(header["config"])
        self.rotations = None
        if self.config.calibrated:
            self.rotations = _rotations(header, self.config.fitted)
        self._followed = None
        self._clear()
        try:
            self._restore(header, tree)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            self._clear()
            raise UserError(
                f"[CompressedKVCache] a state with parts missing or cut ({error})"
            ) from None

    def _restore(self, header: dict, tree: dict) -> None:
        self._restore_extra(header, tree)
        for name in ("live", "sink"):
            if name in tree:
                pair = (tree[name]["keys"], tree[name]["values"])
                setattr(self, f"_{name}", tuple(mx.contiguous(x) for x in pair))
        if self._live is not None:
            self._count = self._live[0].shape[2]
        if header["pages"]:
            dims = tuple(x.shape[3] for x in self._live)
            self._store = self._new_store(dims, self._live[0].dtype)
            self._store.restore(tree["pages"], header["pages"])
        self.offset = header["offset"]
        sink = self._sink[0].shape[2] if self._sink else 0
        if self.offset != sink + self._paged + self._count + header.get("dropped", 0):
            raise ValueError(f"{self.offset} tokens announced")
        for x in self._arrays():
            if x.shape[:2] != self._live[0].shape[:2]:
                raise ValueError("arrays of different batches or heads")

    @property
    def meta_state(self) -> str:
        """Empty: the header travels in `state` (mlx-lm 0.31)."""
        return ""

    @classmethod
    def merge(cls, caches: list[CompressedKVCache]):
        """Sequences as one batch (mlx-lm's BatchGenerator): a `BatchedKVCache`."""
        from mlxkv.batch import BatchedKVCache  # which is built on this class

        return BatchedKVCache.merge(caches)

    def __copy__(self) -> CompressedKVCache:
        """As independent as a deep copy: writing in place must not reach the other."""
        out = self.from_state(self.state)
        out._followed = self._followed
        return out

    @classmethod
    def from_state(cls, state: dict, meta_state: str = "") -> CompressedKVCache:
        """The cache that `state` was taken from."""
        out = cls.__new__(cls)
        out.state = state
        return out


def _rotations(header: dict, kinds: calibrated.Kinds) -> Rotations:
    """Those that a state names, and no others."""
    match header.get("calibration"):
        case [str(digest), str(layer)]:
            return calibrated.find(digest, layer, bool(header.get("folded")), kinds)
    raise UserError("[CompressedKVCache] a state that names no calibration; got a calibrated cache")
