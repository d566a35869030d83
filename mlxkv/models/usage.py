"""The memory of a KV cache in figures, by one rule for `chat`, `serve` and `demo`.

In use: the bytes of the tokens that a cache holds: codes and scales of sealed pages, the exact tokens of the
windows and of the page that was sealed last. Exact numbers count 16 bits, also on a CPU that holds them in 32,
so that the two figures compare. 16 bits: what caches without compression take for the same tokens, by the same
rule (a sliding window counts its window). Allocated: the arrays with their room to grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.latent import LatentKVCache
from mlxkv.console import human_bytes
from mlxkv.formats.config import CacheConfig
from mlxkv.models.hooks.probe import leaves

BITS = 16  # of full precision
EXACT_BYTES = BITS // 8  # of an exact number, where it is held in 32 bits, too
EXACT = ("live", "sink", "last")  # windows in the state of a cache
NOTHING_YET = "nothing compressed yet (exact up to {} tokens)"
NOTHING = "nothing compressed (full precision)"


@dataclass(frozen=True)
class Usage:
    """Figures of the caches of one sequence, or the sum of several.

    kv_bytes: in use. kv_bytes_fp16: the same tokens in 16 bits. allocated: with the room to grow. window:
    tokens that stay exact before the first page is sealed, of a preset that compresses; else 0. tokens: of
    the longest sequence. compressed: of them in pages.
    """

    tokens: int
    kv_bytes: int
    kv_bytes_fp16: int
    allocated: int
    window: int = 0
    compressed: int = 0

    @property
    def note(self) -> str | None:
        """Return why there are no bits to tell, or None."""
        if not self.window:
            return NOTHING
        if self.tokens <= self.window:
            return NOTHING_YET.format(self.window)
        if self._bits > BITS:  # the page that was sealed last is kept twice
            return f"little compressed yet (exact up to {self.window} tokens)"
        return None

    @property
    def bits_per_value(self) -> float | None:
        """Bits in use for a number of the keys and values, windows included; None where `note` says why."""
        return None if self.note or not self.kv_bytes_fp16 else self._bits

    @property
    def _bits(self) -> float:
        return BITS * self.kv_bytes / self.kv_bytes_fp16 if self.kv_bytes_fp16 else 0.0

    @property
    def figures(self) -> dict:
        """The fields of `mlxkv chat --json`."""
        bits = self.bits_per_value
        return {
            "kv_bytes": self.kv_bytes,
            "kv_bytes_fp16": self.kv_bytes_fp16,
            "kv_bytes_allocated": self.allocated,
            "bits_per_value": None if bits is None else round(bits, 3),
            "kv_note": self.note,
        }

    def saving(self) -> str:
        """Return '5.1 MiB instead of 9.8 MiB, saves 48 %', or the bytes alone where nothing is saved."""
        packed = human_bytes(self.kv_bytes)
        if self.kv_bytes >= self.kv_bytes_fp16:
            return packed
        share = 100 * (1 - self.kv_bytes / self.kv_bytes_fp16)
        return f"{packed} instead of {human_bytes(self.kv_bytes_fp16)}, saves {share:.0f} %"

    def line(self) -> str:
        """Return 'cache 5.1 MiB instead of 9.8 MiB, saves 48 %', or why nothing is compressed."""
        return f"cache {self.saving()}" + (f", {self.note}" if self.note else "")


def usage(caches: Sequence[Any]) -> Usage:
    """Measure the caches of one sequence, a layer each."""
    layers = [cache for _, cache in leaves(caches)]
    compressed_layers = [cache for cache in layers if isinstance(cache, CompressedKVCache)]
    return Usage(
        max((getattr(cache, "offset", 0) for cache in layers), default=0),
        sum(map(in_use, caches)),
        sum(map(in_16_bits, caches)),
        sum(cache.nbytes for cache in caches),
        max((cache.config.window for cache in compressed_layers), default=0),
        max((x.store.count * x.config.page for x in compressed_layers if x.store), default=0),
    )


def projected(caches: Sequence[Any], tokens: int) -> Usage:
    """Compute what the same caches take once they hold `tokens` tokens. caches: that hold a token at least."""
    sizes = [sizes_of(cache) for _, cache in leaves(caches)]
    packed, half = ([f(x, tokens) for x in sizes] for f in (Sizes.in_use, Sizes.bytes_fp16))
    return replace(usage(caches), tokens=tokens, kv_bytes=sum(packed), kv_bytes_fp16=sum(half))


def window_of(loaded: Any) -> int:
    """Tokens that stay exact in a model that is attached, or 0 where no layer is compressed."""
    return loaded.kv.window if any(layer.compressed for layer in loaded.layers) else 0


def in_use(cache: Any) -> int:
    """Bytes of the tokens that one cache holds. Nothing is computed."""
    if (inner := getattr(cache, "caches", None)) is not None:
        return sum(map(in_use, inner))
    if isinstance(cache, CompressedKVCache):
        tree = {name: x for name, x in cache.state.items() if name != "header"}
        exact = tree_flatten([tree.pop(name) for name in EXACT if name in tree])
        return EXACT_BYTES * sum(x.size for _, x in exact) + sum(
            x.nbytes for _, x in tree_flatten(tree)
        )
    return in_16_bits(cache)


def in_16_bits(cache: Any) -> int:
    """Bytes of the same tokens in a cache of 16 bits that does not compress."""
    if (inner := getattr(cache, "caches", None)) is not None:
        return sum(map(in_16_bits, inner))
    return sizes_of(cache).bytes_fp16(getattr(cache, "offset", 0))


@dataclass(frozen=True)
class Sizes:
    """Sizes of one layer's cache, in bytes.

    fixed: whatever it holds. half: of a token in 16 bits. window: tokens that it keeps; 0: all. config: None where it
    is not compressed. page_bytes: codes and scales of one page of all tokens, rotary keys beside latents as they are
    stored. bases: that follow the text.
    """

    fixed: int = 0
    half: int = 0
    window: int = 0
    config: CacheConfig | None = None
    page_bytes: float = 0.0
    bases: int = 0

    def in_use(self, tokens: int, rests: bool = False) -> int:
        """Bytes of so many tokens. rests: on a shelf, where nobody needs the exact tokens of the page that was sealed
        last."""
        c = self.config
        if c is None:
            return self.bytes_fp16(tokens)
        if tokens <= c.window:
            return self.half * tokens
        pages = c.pages_over(tokens - c.sink)
        exact = tokens - pages * c.page + (0 if rests and not c.listens else c.page)
        return int(pages * self.page_bytes) + self.half * exact + self.bases

    def bytes_fp16(self, tokens: int) -> int:
        """Bytes of the same tokens in 16 bits."""
        return self.fixed + self.half * (min(tokens, self.window) if self.window else tokens)


def sizes_of(cache: Any) -> Sizes:
    """The sizes of one cache. A compressed one has to hold a token."""
    if not isinstance(cache, CompressedKVCache):
        keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
        if not (isinstance(keys, mx.array) and isinstance(values, mx.array)) or keys.ndim != 4:
            return Sizes(fixed=cache.nbytes)  # a state of fixed size: compression changes nothing
        window = getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None) or 0
        return Sizes(half=EXACT_BYTES * _numbers((keys, values)), window=window)
    if (pair := cache.live) is None:
        return Sizes()
    config, dims, numbers = cache.config, [x.shape[3] for x in pair], _numbers(pair)
    if isinstance(cache, LatentKVCache) and config.rotary == BITS:
        bits = dims[0] * config.keys.bits_per_value(dims[0], config.page)
        packed = config.page * (bits / 8 + pair[0].dtype.size * dims[1])
    else:
        packed = config.page * numbers * replace(config, keep=1.0).bits_per_value(*dims) / 8
    bases = config.basis_bytes(pair[0].shape[1], *dims)
    return Sizes(half=EXACT_BYTES * numbers, config=config, page_bytes=packed, bases=bases)


def _numbers(pair: tuple[mx.array, mx.array]) -> int:
    """Numbers of the keys and values of one token, [B, G, T, D]."""
    return sum(x.shape[0] * x.shape[1] * x.shape[3] for x in pair)
