"""Whether what a file says about a layer's cache is a cache of this model: shapes, counts and numbers."""

from __future__ import annotations

import torch

from cuda_track.cache.stores import Codes, codecs_of
from cuda_track.codec.maps import LayerMaps
from cuda_track.codec.records import as_codes
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.records import NAMES
from mlxkv.formats.saved import state
from mlxkv.models.catalog.shapes import LayerShape

WINDOWS = (
    "live",
    "sink",
    "last",
    "basis",
    "asked",
    "rotary",
)  # of a state, in floating-point numbers
CPU = torch.device("cpu")


def check_compressed(
    tree: dict, shape: LayerShape, config: CacheConfig, maps: LayerMaps | None, tokens: int
) -> None:
    """Raise UserError or ValueError, and what reading lists and dicts raises, unless `tree` is the state of a
    compressed cache of so many tokens."""
    header, found = state.read_header(bytes(tree["header"][: state.LONGEST].tolist()))
    state.check_config(found, config)
    if header["offset"] != tokens:
        raise ValueError(f"a cache of {header['offset']} tokens, not {tokens}")
    dims, heads = (shape.key_dim, shape.value_dim), shape.kv_heads
    codecs = codecs_of(config, dims, maps, CPU)
    pages, bases, one = dict(tree.get("pages", {})), {}, Codes(config, codecs)
    one.append(tuple(torch.zeros(1, heads, config.page, dim) for dim in dims), 1)
    page = one.state
    if shape.kind == "latent" and config.rotary == 16:  # beside the pages
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
    token = tuple((1, heads, 1, dim) for dim in dims)
    tree = tree | {"pages": pages}
    state.check_shapes(tree, config, token, page, counts, bases)
    rest = {name: x for name, x in pages.items() if name.startswith("basis")}
    _check_floats(rest | {name: tree.get(name, {}) for name in WINDOWS})
    check_finite(tree)


def check_plain(tree: dict, shape: LayerShape, window: int | None, tokens: int) -> None:
    """The same for the state of one of mlx-lm's caches. window: of a sliding layer, else None."""
    keys, values, *counts = (tree[str(i)] for i in range(len(tree)))
    if len(counts) != (1 if window is None else 4) or any(n.is_floating_point() for n in counts):
        raise ValueError("parts of a cache missing, or too many")
    offset, *more = (int(n) for n in counts)
    for x, dims in ((keys, shape.key_dim), (values, shape.value_dim)):
        state.check_shape("windows", x, (1, shape.kv_heads, keys.shape[2], dims))
    if offset != tokens or (more and (more[0] != 0 or more[1] != window)):
        raise ValueError("a cache of other tokens, or of another window")
    state.check_rows(keys.shape[2], offset, *more)
    check_finite(tree)
    _check_floats({"keys": keys, "values": values})


def _check_floats(tree: dict) -> None:
    for x in tree.values():
        if isinstance(x, dict):
            _check_floats(x)
        elif not x.is_floating_point():
            raise ValueError("windows that are no floating-point numbers")


def check_finite(tree: dict) -> None:
    """Raise ValueError for a number that is none."""
    for x in tree.values():
        if isinstance(x, dict):
            check_finite(x)
        elif x.is_floating_point() and not torch.isfinite(x).all():
            raise ValueError("numbers that are not finite")
