"""Check that the state of a cache, read from a file, is that of a cache of this model: shapes, counts and numbers."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from cuda_track.cache.compressed import CompressedKVCache
from cuda_track.cache.latent import LatentKVCache
from cuda_track.cache.stores import Codes, codecs_of
from cuda_track.codec.codec import both
from cuda_track.codec.records import as_codes
from cuda_track.models.layers import held
from mlxkv.formats import state
from mlxkv.formats.records import NAMES

WINDOWS = "live", "sink", "last", "basis", "asked", "rotary"  # floating-point numbers of a state


def check_compressed(tree: dict, like: CompressedKVCache, tokens: int) -> None:
    """Raise UserError or ValueError, and what reading lists and dicts raises, unless `tree` is the state that `like`,
    which the model has given one token, could have after `tokens` of them."""
    header, saved_config = state.read_header(bytes(tree["header"][: state.LONGEST].tolist()))
    config, maps, recent = like.config, like.layer_maps, like.view().recent
    state.check_config(saved_config, config)
    if header["offset"] != tokens:
        raise ValueError(f"a cache of {header['offset']} tokens, not {tokens}")
    dims, heads = both(lambda x: x.shape[3], recent), recent[0].shape[1]
    codecs = codecs_of(config, dims, maps, torch.device("cpu"))
    pages, bases, store = dict(tree.get("pages", {})), {}, Codes(config, codecs)
    store.append(both(lambda dim: torch.zeros(1, heads, config.page, dim), dims), 1)
    page = store.state
    if isinstance(like, LatentKVCache) and config.rotary == 16:  # beside the pages
        del page[NAMES[1]]
    counts = [header["pages"]]
    if "counts" in pages:
        counts = pages["counts"].tolist()
        runs = [name for name in pages if name.startswith("run")]
        pages |= {name: as_codes(pages[name], codecs) for name in runs}
    elif pages and len(page) == len(NAMES):
        pages = as_codes(pages, codecs)
    if maps is not None:
        bases = {name: (1, heads, *getattr(maps, name).down.shape[-2:]) for name in NAMES}
    tree = tree | {"pages": pages}
    state.check_shapes(tree, config, both(lambda x: x.shape, recent), page, counts, bases)
    runs_bases = {name: x for name, x in pages.items() if name.startswith("basis")}
    _check_floats(runs_bases | {name: tree.get(name, {}) for name in WINDOWS})
    _check_finite(tree)


def check_plain(tree: dict, like: DynamicLayer, tokens: int) -> None:
    """Check the same for the state of one of mlx-lm's caches, of a layer of transformers."""
    keys, values, *counts = (tree[str(i)] for i in range(len(tree)))
    window = like.sliding_window if isinstance(like, DynamicSlidingWindowLayer) else None
    if len(counts) != (1 if window is None else 4) or any(n.is_floating_point() for n in counts):
        raise ValueError("parts of a cache missing, or too many")
    offset, *ring = (int(n) for n in counts)
    for x, token in zip((keys, values), held(like), strict=True):
        state.check_shape("windows", x, (*token.shape[:2], keys.shape[2], token.shape[3]))
    if offset != tokens or (ring and ring[:2] != [0, window]):
        raise ValueError("a cache of other tokens, or of another window")
    state.check_rows(keys.shape[2], offset, *ring)
    _check_finite(tree)
    _check_floats({"keys": keys, "values": values})


def _check_floats(tree: dict) -> None:
    if not all(x.is_floating_point() for x in tree_leaves(tree)):
        raise ValueError("windows that are no floating-point numbers")


def _check_finite(tree: dict) -> None:
    floats = (x for x in tree_leaves(tree) if x.is_floating_point())
    if not all(torch.isfinite(x).all() for x in floats):
        raise ValueError("numbers that are not finite")
