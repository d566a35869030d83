"""Bits per value by context: bytes that a cache of one layer has allocated, beside the formula.

No model is needed: random keys and values in 16 bits are fed in chunks, as a prompt is read.
"""

from __future__ import annotations

from mlxkv.config import CacheConfig, parse_kv

HEADS, DIMS = 8, 128  # kv heads and head dim of the models of the paper
CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)
PRESETS = ("oscar-int2", "oscar-int2+g64", "oscar-int2+g32", "hadamard-int2+clip", "naive-int2")
CHUNK = 2048  # tokens at once
COLUMNS = ("context", "formula", "in use", "allocated", "spare room", "bits of pages alone")


def formula(config: CacheConfig, tokens: int, dims: int = DIMS) -> float:
    """Pages at their bits, windows of exactly sink + recent tokens at 16: the paper's 2.28 at 128K.

    A cache keeps up to a page more in its recent window.
    """
    inside = config.bits_per_value(dims, dims)
    kept = min(tokens, config.sink + config.recent)
    return inside + (16 - inside) * kept / tokens


def measured(
    config: CacheConfig, contexts: list[int], heads: int = HEADS, dims: int = DIMS, progress=None
) -> dict[int, dict]:
    """{context: bits per value {"allocated", "in_use"} and "live": tokens at 16 bits}, one cache
    that grows from one context to the next."""
    import mlx.core as mx

    from mlxkv import calibrated
    from mlxkv.cache import CompressedKVCache

    rotations = calibrated.sample(heads, (dims, dims)) if config.calibrated else None
    cache, out, key = CompressedKVCache(config, rotations), {}, mx.random.key(0)
    for context in sorted(contexts):
        while cache.offset < context:
            size = min(CHUNK, context - cache.offset)
            key, *drawn = mx.random.split(key, 3)
            pair = (mx.random.normal((1, heads, size, dims), mx.float16, key=k) for k in drawn)
            cache.update_and_fetch(*pair)
            mx.eval(*cache._arrays())
            if progress:
                progress(size)
        values = 2 * context * heads * dims
        state = cache.state
        exact = [state[name] for name in ("live", "sink", "pages") if name in state]
        used = sum(_bytes(tree) for tree in exact)
        sealed = cache._paged
        out[context] = {
            "allocated": 8 * cache.nbytes / values,
            "in_use": 8 * used / values,
            "full_precision_tokens": context - sealed,
            "bytes": cache.nbytes,
        }
    return out


def _bytes(tree) -> int:
    return sum(map(_bytes, tree.values())) if isinstance(tree, dict) else tree.nbytes


def measure(presets: list[str], contexts: list[int], progress=None) -> dict[str, dict]:
    """Per preset and context: the measured bits, "formula", and "inside", the bits of pages."""
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
                f"{100 * (row['allocated'] / row['in_use'] - 1):.1f} %",
                f"{row['inside']:.3f}",
            )
            for context, row in by_context.items()
        ]
        title = f"{name}: bits per value, {HEADS} kv heads of {DIMS}, windows in 16 bits"
        console.print_table(COLUMNS, cells, title)
