"""A chat session on disk: mlx-lm's prompt-cache file with a header of ours, checked before it is read.

The file is what `mlx_lm.models.cache.save_prompt_cache` writes (safetensors). Its metadata says which
model, which preset and which version wrote it, and holds a checksum of every byte of the file
(computed with the checksum's own 64 characters set to zero).
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from mlxkv import __version__
from mlxkv.config import CacheConfig
from mlxkv.errors import MachineError, UserError

FORMAT = "1"
_NO_CHECKSUM = "0" * 64
_KEY = "mlxkv_checksum"


@dataclass
class Saved:
    """A session as it is stored. `text`: what the cached tokens say, as the chat template wrote it."""

    cache: list
    tokens: list[int]
    messages: list[dict]
    text: str
    raw: bool = False


def path_for(name: str) -> Path:
    """The file for a name the user typed; mlx reads the format from the ending."""
    path = Path(name).expanduser()
    return path if path.suffix == ".safetensors" else path.with_name(path.name + ".safetensors")


def save(name: str, saved: Saved, loaded) -> Path:
    """Writes a session; the file is complete or untouched. Returns its path."""
    if not name.strip():
        raise UserError("[/save] no file name; write /save FILE")
    if not saved.tokens:
        raise UserError("[/save] nothing to save yet: the session is empty")
    path = path_for(name)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"[/save] no such folder; got {str(path.parent)!r}")
    metadata = {
        "mlxkv_format": FORMAT,
        _KEY: _NO_CHECKSUM,
        "mlxkv_version": __version__,
        "mlx_lm_version": version("mlx-lm"),
        "model": loaded.name,
        "fingerprint": loaded.fingerprint,
        "kv_name": loaded.kv_name,
        "kv": json.dumps(loaded.kv.as_dict()),
        "raw": json.dumps(saved.raw),
        "text": saved.text,
        "tokens": json.dumps(saved.tokens),
        "messages": json.dumps(saved.messages, ensure_ascii=False),
    }
    # In the same folder: os.replace is atomic only within one file system.
    draft = path.with_name(f".{path.stem}.{os.getpid()}.safetensors")
    try:
        save_prompt_cache(str(draft), saved.cache, metadata)
        _seal(draft)
        os.replace(draft, path)
    except (OSError, RuntimeError, UserError) as error:
        # A UserError here is _seal's: mlx does not report a short write, the file just ends early.
        cut = "the file was cut short, is the disk full?" if isinstance(error, UserError) else ""
        reason = cut or getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise MachineError(
            f"[/save] could not write {str(path)!r}: {reason}; nothing was changed"
        ) from None
    finally:
        draft.unlink(missing_ok=True)
    return path


def load(name: str, loaded) -> Saved:
    """Reads a session for this model and preset. Raises UserError with the reason when it is not one."""
    if not name.strip():
        raise UserError("[load] no file name; got an empty one")
    path = path_for(name) if not Path(name).expanduser().is_file() else Path(name).expanduser()
    header = _header(path)
    entry = next((key for key in header if key.endswith(".mlxkv_format")), None)
    if entry is None or path.suffix != ".safetensors":
        raise UserError(f"[load] {str(path)!r} is not a session saved by mlxkv chat")
    data = {key.split(".", 1)[1]: value for key, value in header.items() if "." in key}
    if data["mlxkv_format"] != FORMAT:
        raise UserError(
            f"[load] {str(path)!r} has session format {data['mlxkv_format']}; this version reads {FORMAT}"
        )
    if _checksum(path) != data.get(_KEY):
        raise UserError(
            f"[load] {str(path)!r} was changed after it was saved: the checksum differs"
        )
    _check_origin(path, data, loaded)
    try:
        cache = load_prompt_cache(str(path))
        return Saved(
            cache,
            tokens=json.loads(data["tokens"]),
            messages=json.loads(data["messages"]),
            text=data["text"],
            raw=json.loads(data["raw"]),
        )
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"[load] {str(path)!r} cannot be read by mlx-lm {version('mlx-lm')} "
            f"({type(error).__name__}: {error})"
        ) from None


def tokens_of(path: Path) -> list[int]:
    """What a saved session holds, from the header alone. Raises UserError for other files."""
    data = {key.split(".", 1)[1]: value for key, value in _header(path).items() if "." in key}
    try:
        return [int(token) for token in json.loads(data["tokens"])]
    except (KeyError, TypeError, ValueError):
        raise UserError(f"[load] {str(path)!r} is not a session saved by mlxkv") from None


def _check_origin(path: Path, data: dict[str, str], loaded) -> None:
    """Refuses a file of another model, preset or mlx-lm."""
    if data["fingerprint"] != loaded.fingerprint:
        raise UserError(
            f"[load] {str(path)!r} belongs to another model; got {data['model']}; this is {loaded.name}"
        )
    if CacheConfig.from_dict(json.loads(data["kv"])) != loaded.kv:
        raise UserError(
            f"[load] {str(path)!r} was saved with another cache; got --kv {data['kv_name']}; "
            f"this session runs --kv {loaded.kv_name}"
        )
    here = version("mlx-lm").split(".")[:2]
    if data["mlx_lm_version"].split(".")[:2] != here:
        raise UserError(
            f"[load] {str(path)!r} was saved with mlx-lm {data['mlx_lm_version']}; "
            f"its cache format differs from that of mlx-lm {version('mlx-lm')}"
        )


def _header(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file, after a check that the file is whole."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", None) or {}
        ends = [entry["data_offsets"][1] for entry in header.values()]
    except FileNotFoundError:
        raise UserError(f"[load] no such file; got {str(path)!r}") from None
    except OSError as error:
        raise UserError(f"[load] cannot read {str(path)!r}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"[load] {str(path)!r} is not a safetensors file, or only part of one"
        ) from None
    if size != 8 + length + max(ends, default=0):
        raise UserError(f"[load] {str(path)!r} is truncated or has bytes too many")
    return metadata


def _checksum(path: Path) -> str:
    """SHA-256 of the file as it was before its own checksum was filled in."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        start = file.read(8)
        header = file.read(int.from_bytes(start, "little"))
        at = _checksum_at(header)
        digest.update(start + header[:at] + _NO_CHECKSUM.encode() + header[at + 64 :])
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _checksum_at(header: bytes) -> int:
    """Where the 64 characters of the checksum start. mlx writes `"0.mlxkv_checksum":"..."`."""
    key = header.index(f'.{_KEY}"'.encode()) + len(_KEY) + 2
    return header.index(b'"', key) + 1


def _seal(path: Path) -> None:
    """Fills the checksum in and waits until the disk has it all."""
    _header(path)  # raises when a full disk cut the file short
    checksum = _checksum(path)
    with path.open("r+b") as file:
        start = file.read(8)
        at = _checksum_at(file.read(int.from_bytes(start, "little")))
        file.seek(8 + at)
        file.write(checksum.encode())
        file.flush()
        os.fsync(file.fileno())
