"""Measure the memory of a KV cache, by one rule for `chat`, `serve` and `demo`.

In use: bytes of the cached tokens: codes and scales of quantized pages, exact tokens of the windows and of the page
quantized last. Exact numbers count 16 bits, even on a CPU that stores 32, so that the figures are comparable.
16 bits: bytes of uncompressed caches with the same tokens, by the same rule (a sliding window counts its window).
Allocated: the arrays, slack included. `formats.sizes` computes figures that are not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlxkv.cache.batch import BatchedKVCache
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.latent import LatentKVCache
from mlxkv.console import human_bytes
from mlxkv.formats.sizes import EXACT_BYTES, CacheShape
from mlxkv.patching.trees import CLASSES, flat, leaves

BITS = 16  # of full precision
NOTHING_YET = "nothing compressed yet (exact up to {} tokens)"
NOTHING = "nothing compressed (full precision)"


@dataclass(frozen=True)
class Usage:
    """Memory of the caches of one sequence, or the sum of several.

    kv_bytes: in use. kv_bytes_fp16: the same tokens in 16 bits. allocated: slack included. window: exact tokens
    before the first page is quantized, for a preset that compresses; else 0. tokens: length of the longest sequence.
    compressed: how many of them are in pages.
    """

    tokens: int
    kv_bytes: int
    kv_bytes_fp16: int
    allocated: int
    window: int = 0
    compressed: int = 0

    @property
    def note(self) -> str | None:
        """Return why `bits_per_value` is None, or None."""
        if not self.window:
            return NOTHING
        if self.tokens <= self.window:
            return NOTHING_YET.format(self.window)
        if self._bits > BITS:  # the page quantized last is stored twice
            return f"little compressed yet (exact up to {self.window} tokens)"
        return None

    @property
    def bits_per_value(self) -> float | None:
        """Bits in use per number of keys and values, windows included; None for the reason in `note`."""
        return None if self.note or not self.kv_bytes_fp16 else self._bits

    @property
    def _bits(self) -> float:
        return BITS * self.kv_bytes / self.kv_bytes_fp16 if self.kv_bytes_fp16 else 0.0

    @property
    def figures(self) -> dict:
        """Return the fields of `mlxkv chat --json`."""
        bits = self.bits_per_value
        return {
            "kv_bytes": self.kv_bytes,
            "kv_bytes_fp16": self.kv_bytes_fp16,
            "kv_bytes_allocated": self.allocated,
            "bits_per_value": None if bits is None else round(bits, 3),
            "kv_note": self.note,
        }

    def saving(self, short: bool = False) -> str:
        """Return '5.1 MiB instead of 9.8 MiB, saves 48 %', or only the bytes if there is no saving. short: without what
        16 bits take."""
        packed = human_bytes(self.kv_bytes)
        if self.kv_bytes >= self.kv_bytes_fp16:
            return packed
        share = 100 * (1 - self.kv_bytes / self.kv_bytes_fp16)
        full = "" if short else f" instead of {human_bytes(self.kv_bytes_fp16)}"
        return f"{packed}{full}, saves {share:.0f} %"

    def line(self) -> str:
        """Return 'cache 5.1 MiB instead of 9.8 MiB, saves 48 %', with `note`, if any."""
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
    """Compute the memory of these caches at `tokens` tokens. caches: with at least one token each."""
    shapes = [shape_of(cache) for _, cache in leaves(caches)]
    packed, half = (
        sum(x.held(tokens) for x in some) for some in (shapes, [x.plain for x in shapes])
    )
    return replace(usage(caches), tokens=tokens, kv_bytes=packed, kv_bytes_fp16=half)


def window_of(loaded: Any) -> int:
    """Return how many tokens stay exact in an attached model, or 0 if no layer is compressed."""
    return loaded.kv.window if any(layer.compressed for layer in loaded.layers) else 0


def in_use(cache: Any) -> int:
    """Return the bytes of the tokens in one cache. Computes no arrays."""
    if (inner := getattr(cache, "caches", None)) is not None:
        return sum(map(in_use, inner))
    if isinstance(cache, BatchedKVCache):
        if cache.buffers is None:
            return sum(map(in_use, cache.rows))
        return sum(map(shape_of(cache).held, cache.offsets))
    if not isinstance(cache, CompressedKVCache):
        return in_16_bits(cache)
    if cache.recent is None:
        return 0
    tree, dtype, total = cache.state, cache.recent[0].dtype, 0
    for path, x in flat(tree):
        # Not the header, the page counts of runs, or a basis also stored with the pages.
        if path in ("header", "pages.counts") or (path.startswith("basis") and "pages" in tree):
            continue
        exact = x.dtype == dtype and "basis" not in path
        total += EXACT_BYTES * x.size if exact else x.nbytes
    return total


def in_16_bits(cache: Any) -> int:
    """Return the bytes of the same tokens in an uncompressed 16-bit cache."""
    if (inner := getattr(cache, "caches", None)) is not None:
        return sum(map(in_16_bits, inner))
    if isinstance(cache, BatchedKVCache):
        if cache.buffers is None:
            return sum(map(in_16_bits, cache.rows))
        return sum(map(shape_of(cache).plain.held, cache.offsets))
    return shape_of(cache).plain.held(getattr(cache, "offset", 0))


def shape_of(cache: Any) -> CacheShape:
    """Return the shape of one cache, or of a sequence in shared arrays. A compressed one must contain a token."""
    if isinstance(cache, BatchedKVCache):
        shared = cache.buffers
        assert shared is not None
        sizes = shared.heads, *shared.store.dims, shared.config
        return CacheShape(*sizes, number=shared.dtype.size, records=True, together=True)
    if not isinstance(cache, CompressedKVCache):
        keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
        if not (isinstance(keys, mx.array) and isinstance(values, mx.array)) or keys.ndim != 4:
            return CacheShape(kind="state", fixed=cache.nbytes)  # compression changes nothing
        found = [(x.kind, getattr(cache, x.window, None)) for x in CLASSES.values() if x.window]
        kind, window = next(((kind, size) for kind, size in found if size), ("full", 0))
        return CacheShape(*_sizes((keys, values)), kind=kind, window=window, number=keys.dtype.size)
    if (pair := cache.recent) is None:
        return CacheShape()
    heads, key_dim, value_dim = _sizes(pair)
    is_latent = isinstance(cache, LatentKVCache)
    return CacheShape(
        *(heads, key_dim, value_dim, cache.config, "latent" if is_latent else "full"),
        number=pair[0].dtype.size,
        records=not is_latent and cache.plan((key_dim, value_dim), pair[0].dtype).by_kernels,
        together=cache.supports_batching,
    )


def _sizes(pair: tuple[mx.array, mx.array]) -> tuple[int, int, int]:
    """Return B * G, and the key and value dims, of keys and values [B, G, T, D]."""
    keys, values = pair
    return keys.shape[0] * keys.shape[1], keys.shape[3], values.shape[3]
