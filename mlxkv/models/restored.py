"""Check that caches read from a file are caches of this model: kinds, shapes, counts and numbers.

Shapes come first, which cost nothing (MLX is lazy): only what fits is read at all.
"""

from __future__ import annotations

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.stores import codes_of
from mlxkv.formats.records import NAMES
from mlxkv.formats.saved import state

# What mlx-lm's caches say about their kind.
FIXED = ("keep", "max_size", "chunk_size", "group_size", "bits")


def check(cache, like, tokens: int) -> None:
    """Raise UserError or ValueError unless `cache` can go on where `like`, which the model has given one token, could
    after `tokens` of them."""
    if type(cache) is not type(like):
        raise ValueError(f"a {type(cache).__name__}, not a {type(like).__name__}")
    if getattr(cache, "offset", tokens) != tokens:
        raise ValueError(f"a cache of another number of tokens than the {tokens} of the file")
    numbers = (_compressed if isinstance(cache, CompressedKVCache) else _plain)(cache, like)
    sound = [mx.isfinite(x).all() for x in numbers if mx.issubdtype(x.dtype, mx.floating)]
    if sound and not mx.all(mx.stack(sound)).item():
        raise ValueError("numbers that are not finite")


def _compressed(cache: CompressedKVCache, like: CompressedKVCache) -> list[mx.array]:
    """Check all but the numbers, which it returns, those inside of page records, too."""
    state.check_config(cache.config, like.config)
    keys, values = like.live
    dims, heads = (keys.shape[3], values.shape[3]), keys.shape[1]
    token = tuple((1, heads, 1, dim) for dim in dims)
    tree, sealed, maps, page, bases = cache.state, cache.store, like.layer_maps, {}, {}
    runs = [] if sealed is None else getattr(sealed, "runs", [sealed])
    if any(run.count for run in runs):
        store = like.page_store(dims, keys.dtype)
        store.append(tuple(mx.zeros((1, heads, like.config.page, dim)) for dim in dims), 1)
        page = store.state
    if maps is not None:
        bases = {name: (1, heads, *getattr(maps, name).down.shape[-2:]) for name in NAMES}
    state.check_shapes(tree, like.config, token, page, [run.count for run in runs], bases)
    parts = [codes_of(run) for run in runs if run.count]
    exact_arrays = {
        name: x for name, x in tree.get("pages", {}).items() if name.startswith("basis")
    }
    exact_arrays |= {name: x for name, x in tree.items() if name not in ("header", "pages")}
    exact = [x for _, x in tree_flatten(exact_arrays)]
    _check_floats(exact)
    return exact + [x for _, x in tree_flatten(parts)]


def _plain(cache, like) -> list[mx.array]:
    """The same for mlx-lm's own caches."""
    arrays_read, expected = (dict(tree_flatten(member.state)) for member in (cache, like))
    if set(arrays_read) != set(expected):
        raise ValueError("parts of a cache missing, or too many")
    grows, arrays = hasattr(like, "offset"), []
    for name, array in expected.items():
        if type(arrays_read[name]) is not type(array):
            raise ValueError("parts of a cache of other types")
        if isinstance(array, mx.array):
            arrays.append(arrays_read[name])
            shapes = [_without_tokens(x.shape) if grows else x.shape for x in (arrays[-1], array)]
            if shapes[0] != shapes[1]:
                raise ValueError(f"numbers of shape {arrays[-1].shape}, not {array.shape}")
            if mx.issubdtype(array.dtype, mx.floating):
                _check_floats(arrays[-1:])
    if any(getattr(cache, name, None) != getattr(like, name, None) for name in FIXED):
        raise ValueError("a cache with other settings")
    if isinstance(getattr(like, "keys", None), mx.array) and isinstance(like.offset, int):
        rows, start = cache.keys.shape[2], getattr(cache, "start_position", 0)
        if cache.values.shape[2] != rows or not 0 <= start <= cache.offset:
            raise ValueError("keys and values of other tokens")
        ring = (getattr(cache, name, None) for name in ("max_size", "_idx"))
        state.check_rows(rows, cache.offset - start, getattr(cache, "keep", 0), *ring)
    return arrays


def _without_tokens(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], *shape[-1:])


def _check_floats(arrays: list[mx.array]) -> None:
    if not all(mx.issubdtype(x.dtype, mx.floating) for x in arrays):
        raise ValueError("windows that are no floating-point numbers")
