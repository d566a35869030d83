"""The file of a session: mlx-lm's prompt cache (safetensors) with entries that say which model and which cache
wrote it, and a SHA-256 of every byte, computed with the checksum's own 64 characters set to zero.

No framework is imported here: both tracks write and read these files.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxkv import __version__
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.marks import same_model

FORMAT = "1"
KEY = "mlxkv_checksum"
NO_CHECKSUM = "0" * 64


@dataclass
class Saved:
    """A session. text: what the cached tokens say, as the chat template wrote it."""

    cache: Any
    tokens: list[int]
    messages: list[dict] = field(default_factory=list)
    text: str = ""
    raw: bool = False


def entries(
    saved: Saved, model: str, fingerprint: str, kv_name: str, kv: CacheConfig, mlx_lm: str
) -> dict[str, str]:
    """The metadata of a session. mlx_lm: the version whose format of prompt caches this is."""
    return {
        "mlxkv_format": FORMAT,
        KEY: NO_CHECKSUM,
        "mlxkv_version": __version__,
        "mlx_lm_version": mlx_lm,
        "model": model,
        "fingerprint": fingerprint,
        "kv_name": kv_name,
        "kv": json.dumps(kv.as_dict()),
        "raw": json.dumps(saved.raw),
        "text": saved.text,
        "tokens": json.dumps(saved.tokens),
        "messages": json.dumps(saved.messages, ensure_ascii=False),
    }


def read_entries(path: Path) -> dict[str, str]:
    """Metadata of a safetensors file, by the name that `entries` gives; {} if it has none. Raises UserError."""
    return {key.split(".", 1)[1]: value for key, value in header(path).items() if "." in key}


def check(path: Path, data: dict[str, str], loaded_name: str, fingerprint: str) -> None:
    """Raise UserError unless the file is a whole session of the model with this fingerprint.

    data: `read_entries` of it.
    """
    if "mlxkv_format" not in data:
        raise UserError(f"[load] {str(path)!r} is not a session saved by mlxkv chat")
    if data["mlxkv_format"] != FORMAT:
        raise UserError(
            f"[load] {str(path)!r} has session format {data['mlxkv_format']}; this version reads {FORMAT}"
        )
    if checksum(path) != data.get(KEY):
        raise UserError(
            f"[load] {str(path)!r} was changed after it was saved: the checksum differs"
        )
    if not same_model(data["fingerprint"], fingerprint):
        raise UserError(
            f"[load] {str(path)!r} belongs to another model; got {data['model']}; this is {loaded_name}"
        )


def check_cache(path: Path, data: dict[str, str], kv_name: str, kv: CacheConfig) -> None:
    """Raise UserError unless the session was saved with this cache."""
    if CacheConfig.from_dict(json.loads(data["kv"])) != kv:
        raise UserError(
            f"[load] {str(path)!r} was saved with another cache; got --kv {data['kv_name']}; "
            f"this session runs --kv {kv_name}"
        )


def saved_of(data: dict[str, str], cache) -> Saved:
    """The session of these entries. Raises KeyError or ValueError for entries that are missing or cut."""
    return Saved(
        cache,
        tokens=json.loads(data["tokens"]),
        messages=json.loads(data["messages"]),
        text=data["text"],
        raw=json.loads(data["raw"]),
    )


def header(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file, after a check that the file is whole. Raises UserError."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError
            head = json.loads(file.read(length))
        metadata = head.pop("__metadata__", None) or {}
        ends = [entry["data_offsets"][1] for entry in head.values()]
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


def checksum(path: Path) -> str:
    """SHA-256 of the file as it was before its own checksum was filled in."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        start = file.read(8)
        head = file.read(int.from_bytes(start, "little"))
        at = checksum_at(head)
        digest.update(start + head[:at] + NO_CHECKSUM.encode() + head[at + 64 :])
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def checksum_at(head: bytes) -> int:
    """Where the 64 characters of the checksum start: `"0.mlxkv_checksum":"..."`."""
    key = head.index(f'.{KEY}"'.encode()) + len(KEY) + 2
    return head.index(b'"', key) + 1


def fill_checksum(path: Path) -> None:
    """Write the checksum into its place and wait until the disk has the whole file."""
    header(path)  # raises when a full disk cut the file short
    found = checksum(path)
    with path.open("r+b") as file:
        start = file.read(8)
        at = checksum_at(file.read(int.from_bytes(start, "little")))
        file.seek(8 + at)
        file.write(found.encode())
        file.flush()
        os.fsync(file.fileno())
