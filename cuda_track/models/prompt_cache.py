"""Prompt caches in the files of mlxkv (`mlxkv.formats.session`): written by one track, read by the other.

Sliding layers are transformers' own here and mlx-lm's rotating caches there: both keep a window, in
another order.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import safetensors.torch
import torch
from safetensors import safe_open
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from cuda_track.cache.compressed import CompressedKVCache
from cuda_track.cache.latent import LatentKVCache
from cuda_track.cache.stores import Codes, codecs_of
from cuda_track.codec.codec import both
from cuda_track.codec.maps import LayerMaps
from cuda_track.codec.packing import as_file, from_file
from cuda_track.codec.records import as_codes
from cuda_track.models import latent
from cuda_track.models.attach_model import new_cache
from cuda_track.models.layers import CompressedCache, CompressedLayer, held, holds_state
from cuda_track.models.loader import Loaded
from cuda_track.models.transformers_compat import check_one_process, handed
from mlxkv import files
from mlxkv.catalog.shapes import text_config
from mlxkv.errors import UserError
from mlxkv.formats import session, state
from mlxkv.formats.names import parse_kv
from mlxkv.formats.records import NAMES
from mlxkv.formats.session import Saved

MLX_LM = "0.32"  # whose format of prompt caches this is
PLAIN, ROTATING = "KVCache", "RotatingKVCache"


def save(path: Path, saved: Saved, loaded: Loaded) -> None:
    """Write a session for `loaded`. Raises UserError for a model in several processes."""
    check_one_process(loaded.model, "save", "sessions are saved")
    data = session.entries(
        saved,
        model=loaded.name,
        fingerprint=loaded.fingerprint or "",
        kv_name=loaded.kv_name,
        kv=parse_kv(loaded.kv_name),
        mlx_lm=MLX_LM,
    )
    entries = {f"0.{name}": value for name, value in data.items()}
    tensors, scalars = {}, []
    for i, layer in enumerate(saved.cache.layers):
        kind, tree = _class_of(layer), _state_of(layer)
        if kind == LatentKVCache.__name__ and latent.interleaves(loaded.model):
            tree = latent.paired(tree, pairs=True)
        entries[f"1.{i}"] = kind
        for name, x in _flat(tree, str(i)):
            if isinstance(x, int):
                scalars.append(name)
                x = torch.tensor(x, dtype=torch.int32)
            tensors[name] = as_file(x.detach().cpu())
    entries["2.0"] = ""
    for n, name in enumerate(scalars, 1):
        entries |= {f"2.{n}.0": name, f"2.{n}.1": "scalar"}
    with files.written(path) as file:
        file.write(safetensors.torch.save(tensors, entries))
        session.fill_checksum(file)


def load(path: Path, loaded: Loaded) -> Saved:
    """Read a session of either track. Raises UserError for any other file, model or cache."""
    check_one_process(loaded.model, "load", "sessions are loaded")
    head = session.read_header(path)
    kv = parse_kv(loaded.kv_name)
    session.check_session(head, loaded.name, loaded.fingerprint or "", loaded.kv_name, kv, MLX_LM)
    saved = session.saved_of(
        head, None, text_config(loaded.model.config.to_dict()).get("vocab_size")
    )
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: from_file(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        saved.cache = _cache(head.kinds, tensors, len(saved.tokens), loaded)
    except UserError as error:
        raise head.wrong(f"cannot be used: {error}") from None
    except Exception as error:  # what others wrote may make torch raise anything
        message = session.printable(str(error))
        raise head.wrong(f"cannot be read ({type(error).__name__}: {message})") from None
    return saved


def _cache(kinds: list[str], tensors: dict, tokens: int, loaded: Loaded) -> CompressedCache:
    """Return the caches of these classes, of so many tokens. Raises anything where they are none of this model's."""
    model = loaded.model
    cache = new_cache(model)
    with torch.no_grad():  # for the shapes of its layers
        model(torch.zeros(1, 1, dtype=torch.long, device=model.device), **handed(cache))
    if kinds != [_class_of(layer) for layer in cache.layers]:
        raise ValueError("other caches than those of this model")
    for i, layer in enumerate(cache.layers):
        tree = _tree({n[len(f"{i}.") :]: x for n, x in tensors.items() if n.startswith(f"{i}.")})
        if not isinstance(layer, CompressedLayer):
            assert isinstance(layer, DynamicLayer)  # by `_class_of`
            _check_plain(tree, layer, tokens)
            _fill(layer, tree)
            continue
        _check_compressed(tree, layer.cache, tokens)
        if isinstance(layer.cache, LatentKVCache) and latent.interleaves(model):
            tree = latent.paired(tree, pairs=False)
        find = partial(_maps, layer.cache.layer_maps)
        layer.cache = layer.cache.from_state(tree, find, model.device)
    return cache


def _maps(maps: LayerMaps | None, digest: str, *_) -> LayerMaps:
    """Return `maps`, unless a cache was stored by those of another calibration."""
    if maps is None or maps.digest != digest:
        raise UserError(
            f"[load] this cache needs the calibration it was stored with; got another; load its "
            f"model with that file, digest {digest}"
        )
    return maps


# -- Check that the state of a cache, read from a file, is that of a cache of this model: shapes, counts and numbers.

WINDOWS = "live", "sink", "last", "basis", "asked", "rotary"  # floating-point numbers of a state


def _check_compressed(tree: dict, like: CompressedKVCache, tokens: int) -> None:
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


def _check_plain(tree: dict, like: DynamicLayer, tokens: int) -> None:
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


# Layers of transformers <-> states of mlx-lm: (keys, values, tokens) of a plain cache; (keys, values,
# tokens, kept, window, place of the next token) of a rotating one.


def _class_of(layer) -> str:
    """Return the class in mlx-lm or mlxkv of the cache of a layer."""
    if isinstance(layer, CompressedLayer):
        return type(layer.cache).__name__
    if not isinstance(layer, DynamicLayer) or holds_state(layer):
        raise UserError(
            f"[save] sessions hold keys and values; got a layer of {type(layer).__name__}; choose a model "
            "of attention alone"
        )
    return ROTATING if layer.is_sliding else PLAIN


def _state_of(layer) -> dict:
    if isinstance(layer, CompressedLayer):
        return layer.cache.state
    keys, values, tokens = layer.keys, layer.values, layer.get_seq_length()
    if not layer.is_sliding:
        return {"0": keys, "1": values, "2": tokens}
    window = layer.sliding_window
    if tokens >= window:  # one place more than here: what is in it is overwritten first of all
        keys, values = (torch.cat([x[:, :, :1], x], 2) for x in (keys, values))
    return {"0": keys, "1": values, "2": tokens, "3": 0, "4": window, "5": keys.shape[2]}


def _fill(layer: DynamicLayer, tree: dict) -> None:
    tokens, device = int(tree["2"]), held(layer)[0].device
    pair = (tree[name].to(device) for name in ("0", "1"))
    if isinstance(layer, DynamicSlidingWindowLayer):
        place, window = int(tree["5"]), layer.sliding_window
        keys, values = (_in_order(x, place, tokens)[:, :, 1 - window :] for x in pair)
        layer.cumulative_length = tokens
    else:
        keys, values = (x[:, :, :tokens] for x in pair)
    layer.keys, layer.values = keys.clone(), values.clone()


def _in_order(x: torch.Tensor, place: int, tokens: int) -> torch.Tensor:
    """Return a ring whose next token goes to `place` -> oldest first, without room that was never used."""
    if place == x.shape[2]:
        return x
    if place < tokens:
        return torch.cat([x[:, :, place:], x[:, :, :place]], 2)
    return x[:, :, :place]


def _flat(tree: dict, name: str):
    for key, x in tree.items():
        if isinstance(x, dict):
            yield from _flat(x, f"{name}.{key}")
        else:
            yield f"{name}.{key}", x


def _tree(flat: dict) -> dict:
    out: dict = {}
    for name, x in flat.items():
        *folders, last = name.split(".")
        inside = out
        for folder in folders:
            inside = inside.setdefault(folder, {})
        inside[last] = x
    return out
