"""Prompt caches in the files of mlxkv: written on one side, read on the other.

The file is mlx-lm's prompt cache (safetensors) with mlxkv's header in its metadata, sealed by a
SHA-256 of every byte (see `mlxkv.prompt_cache`). Sliding layers are transformers' own here and
mlx-lm's rotating caches there: both keep a window, in another order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from cuda_track import calibrated
from cuda_track.adaptive import AdaptiveKVCache
from cuda_track.cache import CompressedKVCache
from cuda_track.calibrated import Rotations
from cuda_track.models.layers import CompressedCache, CompressedLayer, plain_layers
from cuda_track.models.loader import Loaded
from cuda_track.models.parallel import insist_on_one
from cuda_track.models.seam import Attached, attached
from cuda_track.packing import as_file, from_file
from mlxkv import __version__
from mlxkv.config import CacheConfig, parse_kv
from mlxkv.errors import UserError

FORMAT = "1"
MLX_LM = "0.32"  # whose format of prompt caches this is
_NO_CHECKSUM = "0" * 64
_KEY = "mlxkv_checksum"
PLAIN, ROTATING = "KVCache", "RotatingKVCache"
OURS = {kind.__name__: kind for kind in (CompressedKVCache, AdaptiveKVCache)}


@dataclass
class Saved:
    """A session as it is stored. text: what the cached tokens say, as the chat template wrote it."""

    cache: CompressedCache
    tokens: list[int]
    messages: list[dict] = field(default_factory=list)
    text: str = ""
    raw: bool = False


def save(path: Path, saved: Saved, loaded: Loaded) -> None:
    """Writes a session for `loaded`. Raises UserError for a model in several processes."""
    insist_on_one(loaded.model, "save", "sessions are saved")
    metadata = {
        "mlxkv_format": FORMAT,
        _KEY: _NO_CHECKSUM,
        "mlxkv_version": __version__,
        "mlx_lm_version": MLX_LM,
        "model": loaded.name,
        "fingerprint": loaded.fingerprint or "",
        "kv_name": loaded.kv_name,
        "kv": json.dumps(parse_kv(loaded.kv_name).as_dict()),
        "raw": json.dumps(saved.raw),
        "text": saved.text,
        "tokens": json.dumps(saved.tokens),
        "messages": json.dumps(saved.messages, ensure_ascii=False),
    }
    entries = {f"0.{name}": value for name, value in metadata.items()}
    tensors, scalars = {}, []
    for i, layer in enumerate(saved.cache.layers):
        kind, state = _state_of(layer)
        entries[f"1.{i}"] = kind
        for name, x in _flat(state, str(i)):
            if isinstance(x, int):
                scalars.append(name)
                x = torch.tensor(x, dtype=torch.int32)
            tensors[name] = as_file(x.detach().cpu())
    entries["2.0"] = ""
    for n, name in enumerate(scalars, 1):
        entries |= {f"2.{n}.0": name, f"2.{n}.1": "scalar"}
    save_file(tensors, path, entries)
    _seal(path)


def load(path: Path, loaded: Loaded) -> Saved:
    """Reads a session of either side. Raises UserError where it is none, or not for this model."""
    insist_on_one(loaded.model, "load", "sessions are loaded")
    try:
        with safe_open(path, "pt") as file:
            entries = file.metadata() or {}
            tensors = {name: from_file(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors raises its own, and OSError
        raise UserError(f"[load] {str(path)!r} is no readable safetensors file: {error}") from None
    data = {name[2:]: value for name, value in entries.items() if name.startswith("0.")}
    if data.get("mlxkv_format") != FORMAT:
        raise UserError(f"[load] {str(path)!r} is not a session of format {FORMAT} of mlxkv")
    if _checksum(path) != data.get(_KEY):
        raise UserError(
            f"[load] {str(path)!r} was changed after it was saved: the checksum differs"
        )
    if data["fingerprint"] != (loaded.fingerprint or ""):
        raise UserError(
            f"[load] {str(path)!r} belongs to another model; got {data['model']}; this is {loaded.name}"
        )
    if CacheConfig.from_dict(json.loads(data["kv"])) != parse_kv(loaded.kv_name):
        raise UserError(
            f"[load] {str(path)!r} was saved with another cache; got --kv {data['kv_name']}; "
            f"this session runs --kv {loaded.kv_name}"
        )
    try:
        cache = _cache(entries, tensors, loaded)
        return Saved(
            cache,
            json.loads(data["tokens"]),
            json.loads(data["messages"]),
            data["text"],
            json.loads(data["raw"]),
        )
    except (KeyError, IndexError, TypeError) as error:
        raise UserError(f"[load] {str(path)!r} has parts missing ({error})") from None


def _cache(entries: dict[str, str], tensors: dict, loaded: Loaded) -> CompressedCache:
    layers, find = plain_layers(loaded.model), _finder(attached(loaded.model))
    for i, plain in enumerate(layers):
        tree = _tree({n[len(f"{i}.") :]: x for n, x in tensors.items() if n.startswith(f"{i}.")})
        kind = entries[f"1.{i}"]
        if kind in OURS:
            made = OURS[kind].from_state(tree, find, loaded.model.device)
            layers[i] = CompressedLayer(made)
            layers[i].is_initialized = True
        elif kind in (PLAIN, ROTATING):
            _fill(plain, tree, loaded.model.device)
        else:
            raise UserError(f"[load] no layer of this side; got {kind}")
    return CompressedCache(layers=layers)


def _finder(made: Attached) -> Callable[[str, str, CacheConfig], Rotations]:
    def find(digest: str, layer: str, config: CacheConfig) -> Rotations:
        if made.calibration is None or made.calibration.digest != digest:
            raise UserError(
                f"[load] this cache needs the calibration it was stored with; got another; load its "
                f"model with that file, digest {digest}"
            )
        return calibrated.of(made.calibration, config.fitted, [layer])[layer]

    return find


# Layers of transformers <-> states of mlx-lm: (keys, values, tokens) of a plain cache; (keys, values,
# tokens, kept, window, place of the next token) of a rotating one.


def _state_of(layer) -> tuple[str, dict]:
    if isinstance(layer, CompressedLayer):
        return type(layer.cache).__name__, layer.cache.state
    keys, values, tokens = layer.keys, layer.values, layer.get_seq_length()
    if not layer.is_sliding:
        return PLAIN, {"0": keys, "1": values, "2": tokens}
    window = layer.sliding_window
    if tokens >= window:  # one place more than here: what is in it is overwritten first of all
        keys, values = (torch.cat([x[:, :, :1], x], 2) for x in (keys, values))
    return ROTATING, {
        **{"0": keys, "1": values, "2": tokens, "3": 0, "4": window, "5": keys.shape[2]}
    }


def _fill(layer, state: dict, device: torch.device) -> None:
    keys, values = (state[name].to(device) for name in ("0", "1"))
    tokens = int(state["2"])
    if layer.is_sliding:
        place, window = int(state["5"]), layer.sliding_window
        keys, values = (_in_order(x, place, tokens)[:, :, 1 - window :] for x in (keys, values))
        layer.cumulative_length = tokens
    else:
        keys, values = keys[:, :, :tokens], values[:, :, :tokens]
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys.clone(), values.clone()


def _in_order(x: torch.Tensor, place: int, tokens: int) -> torch.Tensor:
    """A ring whose next token goes to `place` -> oldest first, without room that was never used."""
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


def _parts(path: Path) -> tuple[bytes, bytes, int]:
    """The length field, the header, and where in it the checksum starts."""
    with path.open("rb") as file:
        start = file.read(8)
        header = file.read(int.from_bytes(start, "little"))
    key = header.index(f'.{_KEY}"'.encode()) + len(_KEY) + 2
    return start, header, header.index(b'"', key) + 1


def _checksum(path: Path) -> str:
    """SHA-256 of the file as it was before its own checksum was filled in."""
    start, header, at = _parts(path)
    digest = hashlib.sha256(start + header[:at] + _NO_CHECKSUM.encode() + header[at + 64 :])
    with path.open("rb") as file:
        file.seek(8 + len(header))
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _seal(path: Path) -> None:
    checksum, at = _checksum(path), _parts(path)[2]
    with path.open("r+b") as file:
        file.seek(8 + at)
        file.write(checksum.encode())
