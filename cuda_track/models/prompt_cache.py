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
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from cuda_track.cache.latent import LatentKVCache
from cuda_track.codec.maps import LayerMaps
from cuda_track.codec.packing import as_file, from_file
from cuda_track.models import latent, restored
from cuda_track.models.attach_model import new_cache
from cuda_track.models.handing import handed
from cuda_track.models.layers import CompressedCache, CompressedLayer, held, holds_state
from cuda_track.models.loader import Loaded
from cuda_track.models.parallel import insist_on_one
from mlxkv import files
from mlxkv.errors import UserError
from mlxkv.formats import session
from mlxkv.formats.names import parse_kv
from mlxkv.formats.session import Saved
from mlxkv.models.catalog.shapes import text_config

MLX_LM = "0.32"  # whose format of prompt caches this is
PLAIN, ROTATING = "KVCache", "RotatingKVCache"


def save(path: Path, saved: Saved, loaded: Loaded) -> None:
    """Write a session for `loaded`. Raises UserError for a model in several processes."""
    insist_on_one(loaded.model, "save", "sessions are saved")
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
        kind, state = _class_of(layer), _state_of(layer)
        if kind == LatentKVCache.__name__ and latent.interleaves(loaded.model):
            state = latent.paired(state, pairs=True)
        entries[f"1.{i}"] = kind
        for name, x in _flat(state, str(i)):
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
    insist_on_one(loaded.model, "load", "sessions are loaded")
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
            restored.check_plain(tree, layer, tokens)
            _fill(layer, tree)
            continue
        restored.check_compressed(tree, layer.cache, tokens)
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


def _fill(layer: DynamicLayer, state: dict) -> None:
    tokens, device = int(state["2"]), held(layer)[0].device
    pair = (state[name].to(device) for name in ("0", "1"))
    if isinstance(layer, DynamicSlidingWindowLayer):
        place, window = int(state["5"]), layer.sliding_window
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
