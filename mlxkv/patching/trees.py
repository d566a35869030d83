"""The caches that a model makes by itself, and walks through caches and named arrays."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from mlxkv.cache.compressed import CompressedKVCache

MAKE = "make_cache"
PLAIN = "KVCache"  # the class of mlx-lm that our caches replace
MARK = "_mlxkv_attachment"  # the attribute of an attached model
Place = tuple[int, ...]  # position in the list of caches; a second number inside a CacheList


@dataclass(frozen=True)
class CacheClass:
    """A class of caches in mlx-lm.

    kind: as of `LayerShape`. label: of its layers; `{...}` is an attribute of the cache. reason: why it stays in full
    precision. window: the attribute with its window, or "".
    """

    kind: str
    label: str
    reason: str = ""
    window: str = ""

    @property
    def grows(self) -> bool:
        return self.kind in ("full", "own")

    @property
    def has_keys(self) -> bool:
        """Return whether it holds keys and values."""
        return self.kind in ("full", "sliding", "chunked")


_STATE = CacheClass("state", "state space or linear attention", "constant size")
CLASSES = {
    PLAIN: CacheClass("full", "full attention"),
    "RotatingKVCache": CacheClass(
        "sliding", "sliding window {max_size}", "small by nature", "max_size"
    ),
    "ChunkedKVCache": CacheClass(
        "chunked", "chunks of {chunk_size}", "never more than one chunk", "chunk_size"
    ),
    "ArraysCache": _STATE,
    "MambaCache": _STATE,
}


def class_of(cache: Any) -> CacheClass:
    """Return what is known of a cache's class; of others, that they may grow."""
    name = type(cache).__name__
    unknown = CacheClass("own", f"cache of class {name}", "mlxkv does not know this class")
    return CLASSES.get(name, unknown)


def cached_part(model: nn.Module) -> nn.Module:
    """Return the part of a model that makes and reads the caches: `language_model` in mlx-vlm, the model itself in
    mlx-lm."""
    inner = getattr(model, "language_model", None)
    return inner if _is_of_mlx_vlm(model) and isinstance(inner, nn.Module) else model


def _is_of_mlx_vlm(model: nn.Module) -> bool:
    return type(model).__module__.startswith("mlx_vlm.models.")


def own_caches(model: nn.Module) -> list:
    """Make the model's own caches, attached or not; a make_cache set by the user since then counts as its own."""
    make, attachment = getattr(model, MAKE, None), vars(model).get(MARK)
    if attachment is not None and make is attachment:
        return attachment.plain_caches()
    return make() if make else default_caches(model)


def default_caches(model: nn.Module) -> list:
    """Make the caches of a model without `make_cache`: one for each layer, as mlx-lm and mlx-vlm do."""
    cls = KVCache
    if _is_of_mlx_vlm(model):  # its batches accept only its own caches
        cls = sys.modules["mlx_vlm.models.cache"].KVCache
    # By mlx's annotations an attribute of a module is None.
    return [cls() for _ in model.layers]  # pyright: ignore[reportOptionalIterable]


def leaves(caches: Sequence) -> list[tuple[Place, Any]]:
    """Return every cache with its place; the members of a CacheList one by one."""
    out: list[tuple[Place, Any]] = []
    for i, cache in enumerate(caches):
        inner = getattr(cache, "caches", None)
        if inner is None:
            out.append(((i,), cache))
        else:
            out.extend(((i, j), member) for j, member in enumerate(inner))
    return out


def put(caches: list, place: Place, cache) -> None:
    """Set the cache at `place`; inside a CacheList, by replacing its tuple of caches."""
    if len(place) == 1:
        caches[place[0]] = cache
        return
    inner = list(caches[place[0]].caches)
    inner[place[1]] = cache
    caches[place[0]].caches = tuple(inner)


def trim_caches(caches: list, count: int, keep: int) -> bool:
    """Trim caches of `count` tokens to their first `keep`. Returns False, with all unchanged, if one cannot be trimmed:
    a state, a sliding window that has moved on, a prompt whose tokens were selected."""
    if keep == count:
        return keep > 0
    members = [cache for _, cache in leaves(caches)]
    if keep < 1 or not all(_can_keep(cache, count, keep) for cache in members):
        return False
    for cache in members:
        cache.trim(count - keep)
    return True


def _can_keep(cache, count: int, keep: int) -> bool:
    if isinstance(cache, CompressedKVCache):
        return cache.windows.can_keep(keep)
    start = getattr(cache, "start_position", 0)
    return cache.is_trimmable() and count - keep <= cache.offset - start


def flat(tree: Any) -> list[tuple[str, mx.array]]:
    """Return the arrays of a tree with their names, "layers.0.weight"."""
    # mlx's annotations also allow a dict, which is returned only if one is passed as destination.
    return cast(list[tuple[str, mx.array]], tree_flatten(tree))
