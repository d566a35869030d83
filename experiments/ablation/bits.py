"""Measure bits per value by context: allocated bytes of a cache of one layer, beside the formula.

Needs no model: the cache gets random keys and values in 16 bits, in chunks, as a prompt is read.
"""

from __future__ import annotations

from itertools import pairwise

from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import parse_kv

HEADS, DIMS = 8, 128  # kv heads and head dim of the models of the paper
CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)
PRESETS = ("oscar-int2", "oscar-int2+g64", "oscar-int2+g32", "hadamard-int2+clip", "naive-int2")
CHUNK = 2048  # tokens at once
COLUMNS = ("context", "formula", "in use", "allocated", "in decoding, at most", "pages alone")


def formula(config: CacheConfig, tokens: int, dims: int = DIMS) -> float:
    """Return bits with pages at their bits and sink + recent tokens at 16: the paper's 2.28 at 128K.

    A cache keeps up to a page more in its recent window.
    """
    inside = config.bits_per_value(dims, dims)
    kept = min(tokens, config.sink + config.recent)
    return inside + (16 - inside) * kept / tokens


def measured(
    config: CacheConfig, contexts: list[int], heads: int = HEADS, dims: int = DIMS, progress=None
) -> dict[int, dict]:
    """Return {context: row} of one cache that grows from one context to the next, in bits per value.

    "in_use": without spare room. "allocated": after a prompt, with little spare room. "decoding":
    most that is allocated while the next page is decoded token by token, with up to a sixteenth of
    spare room. "exact": tokens in 16 bits. "bytes": allocated.

    Raises UserError if two contexts are less than two pages apart.
    """
    import mlx.core as mx

    from mlxkv.cache.compressed import CompressedKVCache
    from mlxkv.codec import maps

    contexts = sorted(set(contexts))
    if close := [a for a, b in pairwise(contexts) if b - a < 2 * config.page]:
        raise UserError(
            f"[--context] too close to the next one; got {close[0]}; choose contexts at least "
            f"{2 * config.page} tokens apart"
        )
    rotations = None
    if config.calibrated:
        rotations = maps.sample(heads, (dims, dims), config.fitted)
    cache, out, key = CompressedKVCache(config, rotations), {}, mx.random.key(0)

    def feed(size: int) -> float:
        """Append random tokens; return the allocated bits per value."""
        nonlocal key
        key, *drawn = mx.random.split(key, 3)
        cache.update_and_fetch(
            *(mx.random.normal((1, heads, size, dims), mx.float16, key=k) for k in drawn)
        )
        mx.eval(cache.state)
        return 8 * cache.nbytes / (2 * cache.offset * heads * dims)

    for context in contexts:
        while cache.offset < context:
            size = min(CHUNK, context - cache.offset)
            allocated = feed(size)
            if progress:
                progress(size)
        state = cache.state
        held = {name: state[name] for name in ("live", "sink", "pages") if name in state}
        out[context] = row = {
            "in_use": 8 * _bytes(held) / (2 * context * heads * dims),
            "allocated": allocated,
            "exact": sum(held[name]["keys"].shape[2] for name in ("live", "sink") if name in held),
            "bytes": cache.nbytes,
        }
        row["decoding"] = max(feed(1) for _ in range(config.page + 1))
    return out


def _bytes(tree) -> int:
    return sum(map(_bytes, tree.values())) if isinstance(tree, dict) else tree.nbytes


def measure(presets: list[str], contexts: list[int], progress=None) -> dict[str, dict]:
    """Return per preset and context the measured bits, "formula" and "inside", the bits of pages."""
    out = {}
    for name in presets:
        config = parse_kv(name)
        found = measured(config, contexts, progress=progress)
        out[name] = {
            str(context): row
            | {"formula": formula(config, context), "inside": config.bits_per_value(DIMS, DIMS)}
            for context, row in found.items()
        }
    return out


def show(rows: dict[str, dict]) -> None:
    from mlxkv import console

    for name, by_context in rows.items():
        cells = [
            (
                context,
                f"{row['formula']:.3f}",
                f"{row['in_use']:.3f}",
                f"{row['allocated']:.3f}",
                f"{row['decoding']:.3f}",
                f"{row['inside']:.3f}",
            )
            for context, row in by_context.items()
        ]
        title = f"{name}: bits per value, {HEADS} kv heads of {DIMS}, windows in 16 bits"
        console.print_table(COLUMNS, cells, title)
