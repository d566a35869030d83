"""`CompressedKVCache`: a `WindowedCache` on MLX, speaking mlx-lm's cache contract. Works with both contracts of the
pinned range of mlx-lm (0.31: `meta_state`; 0.32: not)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from mlxkv.cache import choose
from mlxkv.cache.attention import DECODE_TOKENS
from mlxkv.cache.batch import BatchedKVCache
from mlxkv.cache.choose import KernelPlan
from mlxkv.cache.contract import BatchMethod, Contract, Snapshots, causal_mask, from_state
from mlxkv.cache.stores import Codes, Records
from mlxkv.cache.view import Pair, View, both
from mlxkv.codec import maps
from mlxkv.codec.maps import LayerMaps
from mlxkv.codec.transform import KeyMean, subtract_mean
from mlxkv.errors import UserError
from mlxkv.formats import state
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.layout import TOKENS
from mlxkv.formats.rules.windowed import WindowedCache
from mlxkv.formats.sizes import grown
from mlxkv.metal.launch import ahead, begin, device_type
from mlxkv.metal.lengths import Division, Rows


def _zeros_like(x: mx.array, tokens: int) -> mx.array:
    return mx.zeros((*x.shape[:2], tokens, x.shape[3]), x.dtype)


def _concatenated(first: mx.array, second: mx.array) -> mx.array:
    return mx.concatenate([first, second], axis=2)


class CompressedKVCache(Snapshots, Contract, WindowedCache):
    """The KV cache of one layer, compressed by `config`. Keys and values: [B, G, L, D].

    layer_maps: the layer's, for a calibrated `config`. plan: its kernels, once chosen (`choose.plan`).
    """

    # Whether other layers of the model have caches of the host, so that no mask fits a batch of both.
    batchable = True
    shares_buffers = True  # sequences of a batch can share arrays
    latent = False  # True if keys are latents (MLA)
    _plan = None
    store: Codes | Records | None
    _zeros, _joined = staticmethod(_zeros_like), staticmethod(_concatenated)
    _copied = staticmethod(mx.contiguous)

    def __init__(
        self,
        config: CacheConfig,
        layer_maps: LayerMaps | None = None,
        plan: KernelPlan | None = None,
    ):
        state.check_calibrated(config, layer_maps)
        self.config = config
        self.layer_maps = layer_maps if config.calibrated else None
        self._plan = plan
        self._forget()

    @property
    def _stored(self) -> CacheConfig:
        """The config without the value map, if the weights already apply it."""
        folded = self.layer_maps is not None and self.layer_maps.folded
        return self.config.folded if folded else self.config

    def transform_values(self, folded: bool) -> None:
        """Convert the values of the windows for a model whose weights map values (`folded`), or do not.

        The codes in pages are the same either way.
        """
        old_maps = self.layer_maps
        if old_maps is None or old_maps.folded == folded:
            return
        self.layer_maps = maps.folded(old_maps, folded)
        transform = old_maps.values.store if folded else old_maps.values.restore
        for name in ("_recent", "sink", "last"):
            if (pair := getattr(self, name)) is not None:
                setattr(self, name, (pair[0], transform(pair[1]).astype(pair[1].dtype)))
        if (old := self.store) is not None:
            self.store = self._new_store(self._existing_recent)
            self.store.restore(old.state, old.count)

    @property
    def _existing_recent(self) -> Pair:
        """Return the buffers of the recent window; the cache must contain tokens."""
        assert self._recent is not None
        return self._recent

    @property
    def _existing_store(self) -> Codes | Records:
        """Return the page store; the cache must have pages."""
        assert self.store is not None
        return self.store

    # -- reading and writing

    @property
    def _paged(self) -> int:
        """Tokens in quantized pages."""
        return self._count_pages * self.config.page

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[View, View]:
        """Append keys, values: [B, G, L, D] and return the view twice (mlx-lm unpacks a pair).

        The view contains the new tokens exactly, even if this call quantizes them.
        """
        if self.layer_maps is not None:
            keys = self.arriving(keys)
        views = self._update(keys, values)
        if keys.shape[2] > DECODE_TOKENS and device_type() != "cpu":
            ahead(self.arrays())
        return views

    @property
    def key_mean(self) -> KeyMean | None:
        """The mean subtracted from keys, for a centred `config`, or None."""
        return self.layer_maps.key_mean if self.layer_maps and self.config.centred else None

    def arriving(self, keys: mx.array) -> mx.array:
        """Return new keys [B, G, L, D] as stored: without their mean, for a centred `config`.

        Raises UserError for heads that were not calibrated.
        """
        if (key_mean := self.key_mean) is not None and self.layer_maps is not None:
            self.layer_maps.check(keys.shape[1])
        return subtract_mean(key_mean, keys)

    def _update(self, keys: mx.array, values: mx.array) -> tuple[View, View]:
        capacity = self.config.recent_capacity(self.sink is not None)
        if self._count + keys.shape[2] <= capacity:
            if self._recent is None or not _alike(self._recent, (keys, values)):
                self._check_new(keys, values)
            self._append(keys, values)
            self.offset += keys.shape[2]
            return self.keys_and_values()
        new, sink, count = self._behind_recent(keys, values), self.sink, self._count_pages
        self._quantize_pages(new)
        # Read the old pages from the new arrays: a reference to the old arrays would make MLX copy all pages. Attention
        # waits for the codes, so that these tokens are freed before the next layer.
        pages = self._existing_store.read(0, count) if count else None
        view = View(new, sink, pages, quantized=self.arrays())
        self.offset += keys.shape[2]
        return view, view

    def keys_and_values(self) -> tuple[View, View]:
        """Return the view without appending anything (mlx-lm 0.32)."""
        pages = self.store and self.store.read_all()
        view = View(self._read_recent(), self.sink, pages, pages is None, buffers=self._recent)
        return view, view

    def _behind_recent(self, keys: mx.array, values: mx.array) -> Pair:
        """Concatenate the recent tokens and new ones."""
        self._check_new(keys, values)
        return self._with_recent((keys, values))

    def _check_new(self, keys: mx.array, values: mx.array) -> None:
        """Raise UserError for another batch or another model's heads, or heads that were not calibrated."""
        if self._recent is None:
            if self.layer_maps is not None:
                self.layer_maps.check(keys.shape[1])
            return
        have = self._recent
        state.check_batch(have[0].shape[0], keys.shape[0])
        if not _alike(have, (keys, values)):
            sizes = (
                f"{k.shape[1]} heads of {k.shape[3]}/{v.shape[3]}"
                for k, v in (have, (keys, values))
            )
            raise UserError(
                "[CompressedKVCache] the cache holds {}; got {}, as of another model".format(*sizes)
            )

    def plan(self, dims: tuple[int, int], dtype: mx.Dtype) -> KernelPlan:
        """Return the kernel plan for (key, value) dims, cached until `launch.state` changes."""
        self._plan = choose.current(self._plan, self._stored, dims, dtype, self.latent)
        return self._plan

    def page_store(self, dims: tuple[int, int], dtype: mx.Dtype) -> Codes | Records:
        """Return an empty store for pages of one transform."""
        return choose.store(self.plan(dims, dtype), self.layer_maps)

    def _new_store(self, pair: Pair) -> Codes | Records:
        return self.page_store((pair[0].shape[3], pair[1].shape[3]), pair[0].dtype)

    # -- a step of fixed shapes (`cache.static`)

    def step_windows(self) -> Pair | None:
        """Return the buffers of the recent window; None before the first page is quantized.

        They have room for all tokens up to the next quantized page and `DECODE_TOKENS` more; pages have room for one.
        """
        if (store := self.store) is None or not (count := store.pages.counts[0]):
            return None
        if store.pages.capacity != grown(count):
            store.reserve_slack()
        capacity = self._recent_capacity + DECODE_TOKENS
        if self._existing_recent[0].shape[2] != capacity:
            recent, self._recent, self._count = self._read_recent(), None, 0
            self._append(*recent, capacity)
        return self._recent

    @property
    def recent(self) -> Pair | None:
        """The tokens of the recent window, or None before there are any."""
        return None if self._recent is None else self._read_recent()

    @property
    def offsets(self) -> tuple[int]:
        """Tokens read, by all its sequences."""
        return (self.offset,)

    @property
    def counters(self) -> tuple[int, int, int]:
        """What `offsets` and `lengths` follow from, for caches of one shape."""
        return self.offset, self._count, self._count_pages

    def quantizes_after(self, new: int) -> bool:
        """Return whether a page must be quantized after `new` more tokens."""
        return self._count + new > self._recent_capacity

    @property
    def division(self) -> Division:
        """How kernels share out their work."""
        return Division(self._existing_store.pages.capacity * self.config.page // TOKENS)

    @property
    def lengths(self) -> tuple[tuple[int, ...], Rows]:
        """The first record, and (records, sink tokens, recent tokens), of each sequence; for plain ops of one, with
        tokens in place of records."""
        store, config, starts = self._existing_store, self.config, (0,)
        stored = store.count * config.page
        if isinstance(store, Records):
            stored //= TOKENS
            if self._existing_recent[0].shape[0] > 1:
                batch, heads, capacity, _ = store.pages.arrays["records"].shape
                starts = tuple(i * heads * capacity for i in range(batch))
        sink = config.sink if self.sink is not None else 0
        return starts, ((stored, sink, self._count),) * len(starts)

    def commit(self, arrays: Sequence[mx.array], new: int) -> None:
        """Replace the buffers of the recent window by some with `new` more tokens, and quantize the pages due."""
        self._recent = arrays[0], arrays[1]
        self._count += new
        self.offset += new
        if self._count > self._recent_capacity:
            self._quantize_pages(self._read_recent())

    # -- the rest of mlx-lm's contract

    def is_trimmable(self) -> bool:
        return True

    def _decoded(self, page: int, count: int) -> Pair:
        pages, (keys, values) = self._existing_store.read(page, page + 1), self._existing_recent
        decoded = pages.decode(0, keys.dtype), pages.decode(1, values.dtype)
        pair = both(lambda x: x[:, :, :count], decoded)
        begin(pair)  # otherwise it would reference the dropped pages
        return pair

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """Return None, "causal" or a boolean [N, offset + N], like mlx-lm's cache."""
        if window_size is None and N == 1:
            return None
        if window_size is None and not return_array:
            return "causal"
        windows = self.windows
        held = windows.offset - windows.dropped
        return causal_mask(held, N, held + N, window_size)

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self._recent is None

    def arrays(self) -> tuple[mx.array, ...]:
        """All allocated arrays."""
        pairs = (self._recent, self.sink, self.last)
        windows = [x for pair in pairs if pair is not None for x in pair]
        return (*windows, *(self.store.arrays() if self.store else ()))

    @property
    def nbytes(self) -> int:
        """Allocated bytes: pages with their spare capacity, sink and recent windows."""
        return sum(x.nbytes for x in self.arrays())

    @property
    def state(self) -> dict:
        """Return everything to save, as a tree of arrays. The header is JSON in bytes, which both contracts support."""
        layer_maps = self.layer_maps
        extra, arrays = self._extra()
        data = state.header(
            self.config,
            self.offset,
            self._count_pages,
            calibration=layer_maps and (layer_maps.digest, layer_maps.layer),
            folded=layer_maps is not None and layer_maps.folded,
            **extra,
        )
        return state.tree(
            mx.array(np.frombuffer(data, np.uint8)),
            recent=None if self._recent is None else self._read_recent(),
            sink=self.sink,
            last=self.last,
            pages=self._existing_store.state if self._count_pages else None,
            more=arrays,
        )

    @state.setter
    def state(self, tree: dict) -> None:
        try:
            data = np.array(tree["header"][: state.LONGEST]).tobytes()
        except (KeyError, TypeError, ValueError, AttributeError):
            raise state.unreadable() from None
        header, self.config = state.read_header(data)
        self.layer_maps, folded = None, False
        if self.config.calibrated:
            saved = (*state.calibration_of(header), bool(header.get("folded")), self.config.fitted)
            folded = maps.reads_folded(*saved)
            self.layer_maps = maps.find(*saved)
        self._forget()
        try:
            self._restore(header, tree)
            self.transform_values(folded)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            self._forget()
            raise state.cut(error) from None

    def _restore(self, header: dict, tree: dict) -> None:
        self._restore_extra(header, tree)
        for name, saved in (("_recent", "live"), ("sink", "sink"), ("last", "last")):
            if (pair := state.window(tree, saved)) is not None:
                setattr(self, name, self._copy(pair))
        if self.last is not None:  # no attention reads it: it would stay a lazy read of the file
            mx.eval(self.last)
        if self._recent is not None:
            self._count = self._recent[0].shape[2]
        recent = self._recent
        if header["pages"]:
            if recent is None:
                raise ValueError("pages without recent tokens")
            self.store = self._new_store(recent)
            self.store.restore(tree["pages"], header["pages"])
        self.offset = header["offset"]
        if self.offset != self.windows.offset:
            raise ValueError(f"{self.offset} tokens announced")
        for x in self.arrays():
            if recent is None or x.shape[:2] != recent[0].shape[:2]:
                raise ValueError("arrays of different batches or heads")

    @property
    def meta_state(self) -> str:
        """Empty: `state` contains the header (mlx-lm 0.31)."""
        return ""

    @BatchMethod
    def merge(cls, caches: list[CompressedKVCache]) -> BatchedKVCache:
        """Merge sequences into a batch (mlx-lm's BatchGenerator)."""
        return BatchedKVCache.merge(caches)

    @property
    def to_batch(self) -> Callable[[list[int] | mx.array], BatchedKVCache]:
        """Return the function that makes an empty batch (`_to_batch`), for a batchable cache."""
        if not self.batchable:
            raise AttributeError("sequences of this model are read one at a time")
        return self._to_batch

    def _to_batch(self, left_padding: list[int] | mx.array) -> BatchedKVCache:
        """Return an empty batch of caches like this one, a sequence per left-padded prompt (mlx-vlm's batches).

        Raises UserError if this cache contains tokens.
        """
        if self.offset:
            raise UserError(
                f"[CompressedKVCache] to_batch makes an empty batch; got a cache of {self.offset} tokens; "
                "choose merge for caches that hold some"
            )
        batch = self.merge([self.like() for _ in left_padding])
        batch.pad(left_padding)
        return batch

    def __reduce__(self):
        return from_state, (type(self), self.state, not self.batchable)

    def __copy__(self) -> CompressedKVCache:
        """Copy deeply: writing in place must not change the other."""
        out = self.from_state(self.state)
        out._plan, out.batchable = self._plan, self.batchable
        return out

    # -- for caches of other forms

    @property
    def supports_batching(self) -> bool:
        """Return whether sequences like this one, which contains tokens, can be decoded together."""
        keys, values = self._existing_recent
        return (
            self.shares_buffers
            and self.plan((keys.shape[3], values.shape[3]), keys.dtype).by_kernels
        )

    def like(self) -> CompressedKVCache:
        """Return an empty cache of the same kind."""
        return type(self)(self.config, self.layer_maps, self._plan)

    def take_over(
        self,
        offset: int,
        recent: Pair,
        sink: Pair | None,
        last: Pair | None,
        store: Codes | Records | None,
    ) -> None:
        """Fill an empty cache with these windows and pages of `offset` tokens; recent is copied."""
        self.sink, self.last, self.store, self.offset = sink, last, store, offset
        self._append(*recent)

    @classmethod
    def from_state(cls, state: dict, meta_state: str = "") -> CompressedKVCache:
        """Return the cache saved as `state`."""
        out = cls.__new__(cls)
        out.state = state
        return out


def _alike(first: Pair, second: Pair) -> bool:
    """Return whether both have the same batch, heads and dims."""
    (k, v), (x, y) = first, second
    return k.shape[:2] == x.shape[:2] and k.shape[3] == x.shape[3] and v.shape[3] == y.shape[3]
