"""`CompressedKVCache`: sink | pages | recent of one layer, and its state as mlxkv saves it.

    tokens:  [ sink: full precision ][ page ] ... [ page ][ live: full precision ]

`live` holds everything until it is full; then the sink moves out and the oldest pages are encoded
and sealed. A sealed token has no full-precision copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from cuda_track.calibrated import Rotations
from cuda_track.kernels.pool import Paged, PoolPages
from cuda_track.sealed import CodePages, Codes
from cuda_track.stores import store
from mlxkv.config import CacheConfig
from mlxkv.errors import UserError

if TYPE_CHECKING:
    from cuda_track.segments import Parts

STATE_VERSION = 2
STEP = 256  # the live window grows by whole steps
SPARE = 16  # ... and by a sixteenth
Pair = tuple[torch.Tensor, torch.Tensor]
FindRotations = Callable[[str, str, CacheConfig], Rotations]  # by digest and layer


@dataclass(frozen=True)
class View:
    """What attention reads, as it was after one update.

    live, sink: (keys, values), each [B, G, T, D]. pages: between the two, or None. heard: called by
    attention with (queries, scale, mask), once it is computed.
    """

    live: Pair
    sink: Pair | None = None
    pages: CodePages | PoolPages | Parts | None = None
    heard: Callable[..., None] | None = field(default=None, repr=False)

    @property
    def windows(self) -> list[Pair]:
        return [self.live] if self.sink is None else [self.sink, self.live]

    @property
    def tokens(self) -> int:
        pages = self.pages.tokens if self.pages else 0
        return pages + sum(keys.shape[2] for keys, _ in self.windows)

    def whole(self, dtype: torch.dtype) -> Pair:
        """Keys and values of all tokens in the model's domain, [B, G, T, D] each."""
        if self.sink is None and self.pages is None:
            return self.live
        out = []
        for side in range(2):
            parts = [pair[side].to(dtype) for pair in self.windows]
            if self.pages is not None:
                parts.insert(len(parts) - 1, self.pages.decode(side, dtype))
            out.append(torch.cat(parts, 2))
        return tuple(out)


class CompressedKVCache:
    """The KV cache of one layer, compressed as `config` says. Keys and values: [B, G, L, D].

    rotations: of this layer, for a calibrated `config`. expected: tokens that will come, or 0; pages
    of a pool get room for them at once. dropped: tokens that were read and are not stored.
    """

    dropped = 0

    def __init__(self, config: CacheConfig, rotations: Rotations | None = None, expected: int = 0):
        if config.calibrated and rotations is None:
            raise UserError(
                "[CompressedKVCache] this configuration needs the rotations of a calibration; got "
                "none; attach it to a model, or choose a preset without calibration"
            )
        self.config, self.expected = config, expected
        self.rotations = rotations if config.calibrated else None
        self._store: Codes | Paged | None = None
        self.clear()

    def clear(self) -> None:
        """Forget all tokens; pages that others hold too stay where they are."""
        if self._store is not None:
            self._store.truncate(0)
        self.offset = self.dropped = 0
        self._live: Pair | None = None  # buffers; `_count` tokens are in use
        self._count = 0
        self._sink: Pair | None = None
        self._store = None

    @property
    def _count_pages(self) -> int:
        return self._store.count if self._store else 0

    @property
    def _room(self) -> int:
        """Tokens that `live` may hold before pages have to be sealed."""
        limit = self.config.recent + self.config.page
        return limit if self._sink is not None or not self.config.sink else limit + self.config.sink

    @property
    def left(self) -> int:
        """Tokens that may come before pages are sealed."""
        return self._room - self._count

    def update_and_fetch(self, keys: torch.Tensor, values: torch.Tensor) -> View:
        """Append keys, values: [B, G, L, D] and return what attention has to read.

        The view holds the new tokens exactly, also when they are sealed by this very call.
        """
        new = (keys, values)
        self._check_batch(keys)
        self.offset += keys.shape[2]
        if self._count + keys.shape[2] <= self._room:
            self._append(new)
            return self.view()
        if self._count:
            new = tuple(torch.cat(pair, 2) for pair in zip(self._read_live(), new, strict=True))
        before = self._view(new)
        self._seal(new)
        return before

    def _check_batch(self, keys: torch.Tensor) -> None:
        if self._live is not None and self._live[0].shape[0] != keys.shape[0]:
            have, got = self._live[0].shape[0], keys.shape[0]
            raise UserError(f"[CompressedKVCache] the cache holds a batch of {have}; got {got}")

    def view(self) -> View:
        """What attention reads, without appending anything."""
        return self._view(self._read_live())

    def _view(self, live: Pair) -> View:
        pages = self._store.read(0, self._store.count) if self._count_pages else None
        return View(live, self._sink, pages)

    def _read_live(self) -> Pair:
        return tuple(x[:, :, : self._count] for x in self._live)

    def _append(self, new: Pair) -> None:
        end = self._count + new[0].shape[2]
        if self._live is None or end > self._live[0].shape[2]:
            spare = max(end, self._count + self._count // SPARE)
            room = max(min(self._room, -(-spare // STEP) * STEP), end)
            grown = tuple(x.new_zeros(*x.shape[:2], room, x.shape[3]) for x in new)
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
            self._sink = tuple(x[:, :, :start].clone() for x in live)
        size = self.config.page
        count = -(-(live[0].shape[2] - start - self._room) // size)
        if self._store is None:
            self._check_heads(live[0].shape[1])
            self._store = self._new_store(live)
            if self.expected:
                self._store.make_room(live, -(-self.expected // size))
        self._store.append(live, count, start)
        self._live, self._count = None, 0
        self._append(tuple(x[:, :, start + count * size :] for x in live))

    def _check_heads(self, heads: int) -> None:
        turns = (self.rotations.keys, self.rotations.values) if self.rotations else ()
        made = {len(turn.down) for turn in turns if turn.down.ndim == 3}
        if made - {heads}:
            raise UserError(
                f"[CompressedKVCache] transforms of {max(made)} kv heads; got keys of {heads}; choose "
                "a calibration of this model, shared as its heads are"
            )

    def _new_store(self, live: Pair) -> Codes | Paged:
        dims = tuple(x.shape[3] for x in live)
        return store(self.config, dims, live[0].device, self.rotations)

    def trim(self, n: int) -> int:
        """Drop the last n tokens, return how many were dropped.

        Exact inside `live`. Further back whole pages go and the cut page is decoded into `live`.
        """
        n = max(0, min(self.offset, n))
        left = self.offset - n
        if n <= self._count:
            self._count -= n
        elif left <= (sink := self._sink[0].shape[2] if self._sink else 0):
            live = tuple(x[:, :, :left] for x in self._sink) if left else None
            self.clear()
            if live is not None:  # only tokens of the sink are left: they are live again
                self._append(live)
        else:
            kept, cut = divmod(left - sink, self.config.page)
            page = self._store.read(kept, kept + 1) if cut else None
            self._count = 0
            if page is not None:
                dtype = self._live[0].dtype
                self._append(tuple(page.decode(side, dtype)[:, :, :cut] for side in (0, 1)))
            self._store.truncate(kept)
        self.offset = left
        return n

    def select(self, rows: torch.Tensor) -> None:
        """Rows of the batch, in this order: beams, finished sequences, repeats."""
        if self._live is None:
            return
        self._live = tuple(x[rows] for x in self._live)
        if self._sink is not None:
            self._sink = tuple(x[rows] for x in self._sink)
        if self._store is not None:
            self._store.select(rows)

    @property
    def nbytes(self) -> int:
        """Allocated bytes: pages with their spare room, sink and live windows."""
        return sum(x.numel() * x.element_size() for x in self._arrays())

    def _arrays(self) -> list[torch.Tensor]:
        windows = [x for pair in (self._live, self._sink) if pair is not None for x in pair]
        return [*windows, *(self._store.arrays() if self._store else ())]

    # -- what mlxkv saves
    # ------------------------------------------------------------------------------------------

    @property
    def state(self) -> dict:
        """All that has to be saved, as a tree of tensors, with mlxkv's header: JSON in bytes."""
        header = {
            "version": STATE_VERSION,
            "config": self.config.as_dict(),
            "offset": self.offset,
            "pages": self._count_pages,
        }
        if self.rotations is not None:
            header["calibration"] = [self.rotations.digest, self.rotations.layer]
            header["folded"] = False
        extra, more = self._extra()
        data = bytearray(json.dumps(header | extra).encode())
        tree: dict = {"header": torch.frombuffer(data, dtype=torch.uint8)}
        if self._live is not None:
            tree["live"] = dict(zip(("keys", "values"), self._read_live(), strict=True))
        if self._sink is not None:
            tree["sink"] = dict(zip(("keys", "values"), self._sink, strict=True))
        if self._count_pages:
            tree["pages"] = self._store.state
        return tree | more

    def _extra(self) -> tuple[dict, dict]:
        """What a subclass saves besides: entries of the header, tensors."""
        return {}, {}

    def _restore_extra(self, header: dict, tree: dict) -> None:
        """The inverse, before pages are restored."""

    @classmethod
    def from_state(
        cls, tree: dict, find: FindRotations | None = None, device: torch.device | None = None
    ) -> CompressedKVCache:
        """The cache that a state of either implementation was taken from.

        find: gives the rotations of (digest, layer, configuration). Raises UserError.
        """
        try:
            header = json.loads(bytes(tree["header"].cpu().tolist()))
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
        config, rotations = CacheConfig.from_dict(header["config"]), None
        if config.calibrated and find is not None:
            rotations = find(*header["calibration"], config)
            rotations = rotations.to(device or rotations.keys.down.device)
        out = cls(config, rotations)
        try:
            out._restore(header, _moved(tree, device))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise UserError(
                f"[CompressedKVCache] a state with parts missing or cut ({error})"
            ) from None
        return out

    def _restore(self, header: dict, tree: dict) -> None:
        self._restore_extra(header, tree)
        for name in ("live", "sink"):
            if name in tree:
                pair = tree[name]["keys"], tree[name]["values"]
                if header.get("folded"):  # weights had turned these values: here they do not
                    turn = self.rotations.to(pair[1].device).values
                    pair = pair[0], turn.restore(pair[1]).to(pair[1].dtype)
                setattr(self, f"_{name}", tuple(x.clone() for x in pair))
        if self._live is not None:
            self._count = self._live[0].shape[2]
        if header["pages"]:
            self._store = self._new_store(self._live)
            self._store.restore(tree["pages"], header["pages"])
        self.offset = header["offset"]
        if self._live is not None and self.offset != self.view().tokens + self.dropped:
            raise ValueError(f"{self.offset} tokens announced")


def _moved(tree: dict, device: torch.device | None) -> dict:
    return {
        name: _moved(x, device) if isinstance(x, dict) else x.to(device) for name, x in tree.items()
    }
