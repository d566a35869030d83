"""What caches check, and the header of a saved one: JSON in bytes beside its tensors.

No framework is imported here: both tracks write and read it.
"""

from __future__ import annotations

import json

from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.records import NAMES

VERSION = 2


def header(
    config: CacheConfig,
    offset: int,
    pages: int,
    calibration: tuple[str, str] | None = None,
    folded: bool = False,
    **more,
) -> bytes:
    """The header of a cache. offset: tokens read. calibration: (digest, layer). folded: whether values are
    stored as weights that apply the value map leave them. more: entries of a kind of cache."""
    data = {"version": VERSION, "config": config.as_dict(), "offset": offset, "pages": pages}
    if calibration is not None:
        data |= {"calibration": list(calibration), "folded": folded}
    return json.dumps(data | more).encode()


def read_header(data: bytes) -> tuple[dict, CacheConfig]:
    """Invert `header`. Raises UserError for anything else, and for other versions."""
    try:
        out = json.loads(data)
        version = out["version"]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise unreadable() from None
    if version != VERSION:
        raise UserError(
            f"[CompressedKVCache] state of another format version; got {version}; "
            f"choose a file of version {VERSION}"
        )
    return out, CacheConfig.from_dict(out["config"])


def check_calibrated(config: CacheConfig, layer_maps) -> None:
    """Raise UserError for a calibrated cache without maps."""
    if config.calibrated and layer_maps is None:
        raise UserError(
            "[CompressedKVCache] this configuration needs the rotations of a calibration; got "
            "none; attach it to a model, or choose a preset without calibration"
        )


def check_batch(have: int, got: int) -> None:
    """Raise UserError unless new tokens are of the batch that the cache holds."""
    if have != got:
        raise UserError(f"[CompressedKVCache] the cache holds a batch of {have}; got {got}")


def tree(header, live, sink, pages, more: dict, last=None) -> dict:
    """What is saved: the header, the windows (keys, values), the exact tokens of the last page and the state
    of the store, each if there is one, and entries of a kind of cache."""
    out: dict = {"header": header}
    for name, pair in (("live", live), ("sink", sink), ("last", last)):
        if pair is not None:
            out[name] = dict(zip(NAMES, pair, strict=True))
    return out | ({} if pages is None else {"pages": pages}) | more


def window(saved: dict, name: str):
    """(keys, values) of a window in `tree`, or None."""
    return (saved[name]["keys"], saved[name]["values"]) if name in saved else None


def unreadable() -> UserError:
    return UserError(
        "[CompressedKVCache] not the state of a compressed cache; got no readable header"
    )


def cut(error: Exception) -> UserError:
    """What to raise for a state whose tensors do not fit its header."""
    return UserError(f"[CompressedKVCache] a state with parts missing or cut ({error})")


def calibration_of(data: dict) -> tuple[str, str]:
    """(digest, layer) of a calibrated cache. Raises UserError."""
    match data.get("calibration"):
        case [str(digest), str(layer)]:
            return digest, layer
    raise UserError("[CompressedKVCache] a state that names no calibration; got a calibrated cache")
