"""The memory of a KV cache in figures, by one rule for `chat`, `serve` and `demo`.

In use: the bytes of the tokens that a cache holds: codes and scales of sealed pages, the exact tokens of the
windows and of the page that was sealed last. Exact numbers count 16 bits, also on a CPU that holds them in 32,
so that the two figures compare. 16 bits: what caches without compression take for the same tokens, by the same
rule (a sliding window counts its window). Allocated: the arrays with their room to grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.latent import LatentKVCache
from mlxkv.console import human_bytes
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
        max((_pages(cache) * cache.config.page for cache in compressed_layers), default=0),
    )


def projected(caches: Sequence[Any], tokens: int) -> Usage:
    """Compute what the same caches take once they hold `tokens` tokens. caches: that hold a token at least."""
    packed = half = 0
    for _, cache in leaves(caches):
        if isinstance(cache, CompressedKVCache):
            config = cache.config
            token_bytes = EXACT_BYTES * _numbers(cache)
            pages = config.pages_over(tokens - config.sink) if tokens > config.window else 0
            exact = tokens - pages * config.page + (config.page if pages else 0)
            packed += (
                int(pages * page_bytes(cache))
                + exact * token_bytes
                + (_bases(cache) if pages else 0)
            )
            half += token_bytes * tokens
        else:
            plain = _plain(cache)
            plain_bytes = EXACT_BYTES * plain[0] * min(tokens, plain[1]) if plain else cache.nbytes
            packed, half = packed + plain_bytes, half + plain_bytes
    return replace(usage(caches), tokens=tokens, kv_bytes=packed, kv_bytes_fp16=half)


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
    if isinstance(cache, CompressedKVCache):
        return EXACT_BYTES * _numbers(cache) * cache.offset
    if (plain := _plain(cache)) is None:
        return cache.nbytes  # a state of fixed size: compression changes nothing
    numbers, most = plain
    return EXACT_BYTES * numbers * min(cache.offset, most)


def page_bytes(cache: CompressedKVCache) -> float:
    """Bytes of the codes and scales of one page of all tokens; rotary keys beside latents as they are stored."""
    keys, values = cache.live
    config, dims = replace(cache.config, keep=1.0), (keys.shape[3], values.shape[3])
    if isinstance(cache, LatentKVCache) and config.rotary == BITS:
        bits = dims[0] * config.keys.bits_per_value(dims[0], config.page)
        return config.page * (bits / 8 + keys.dtype.size * dims[1])
    return config.page * _numbers(cache) * config.bits_per_value(*dims) / 8


def _pages(cache: CompressedKVCache) -> int:
    return cache.store.count if cache.store else 0


def _bases(cache: CompressedKVCache) -> int:
    """Bytes of the bases that follow the text, of presets that have some."""
    keys, values = cache.live
    return cache.config.basis_bytes(keys.shape[1], keys.shape[3], values.shape[3])


def _numbers(cache: CompressedKVCache) -> int:
    """Numbers of the keys and values of one token."""
    live = cache.live
    return 0 if live is None else sum(x.shape[0] * x.shape[1] * x.shape[3] for x in live)


def _plain(cache: Any) -> tuple[int, float] | None:
    """(numbers a token, most tokens kept) of mlx-lm's caches of keys and values [B, G, T, D]; None for others."""
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    if not (isinstance(keys, mx.array) and isinstance(values, mx.array)) or keys.ndim != 4:
        return None
    numbers = sum(x.shape[0] * x.shape[1] * x.shape[3] for x in (keys, values))
    return numbers, getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None) or inf
