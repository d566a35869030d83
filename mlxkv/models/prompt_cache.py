"""A chat session on disk: what mlx-lm's `save_prompt_cache` writes, with the entries of `formats.saved.session`."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path

from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.console import user_path
from mlxkv.errors import MachineError, UserError
from mlxkv.formats.saved import session
from mlxkv.formats.saved.session import Saved
from mlxkv.models.hooks.fold import match_fold
from mlxkv.models.hooks.probe import leaves

ENDING = ".safetensors"
LONGEST = 200  # bytes of a name; file systems take 255, with the ending and the number of a draft


def path_for(name: str, where: str) -> Path:
    """The file for a name the user typed; mlx reads the format from the ending. Raises UserError, `where` in
    brackets, for a name that no file can have."""
    path = user_path(name, where)
    if path.name in ("", ".."):
        raise UserError(f"[{where}] not a name for a file; got {name!r}; write one, like notes")
    if len(os.fsencode(path.name)) > LONGEST:
        raise UserError(f"[{where}] the name is too long for a file; got {name[:60]!r}...")
    return path if path.suffix == ENDING else path.with_name(path.name + ENDING)


def save(name: str, saved: Saved, loaded) -> Path:
    """Write a session; the file is complete or untouched. Returns its path. Raises UserError, MachineError."""
    if not name.strip():
        raise UserError("[/save] no file name; write /save FILE")
    if not saved.tokens:
        raise UserError("[/save] nothing to save yet: the session is empty")
    path = path_for(name, "/save")
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"[/save] no such folder; got {str(path.parent)!r}")
    entries = session.entries(
        saved,
        model=loaded.name,
        fingerprint=loaded.fingerprint,
        kv_name=loaded.kv_name,
        kv=loaded.kv,
        mlx_lm=version("mlx-lm"),
    )
    # In the same folder: os.replace is atomic only within one file system.
    draft = path.with_name(f".{path.stem}.{os.getpid()}{ENDING}")
    try:
        save_prompt_cache(str(draft), saved.cache, entries)
        session.fill_checksum(draft)
        os.replace(draft, path)
    except (OSError, RuntimeError, UserError) as error:
        # fill_checksum raises UserError: mlx does not report a short write, the file just ends early.
        cut = "the file was cut short, is the disk full?" if isinstance(error, UserError) else ""
        reason = cut or getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise MachineError(
            f"[/save] could not write {str(path)!r}: {reason}; nothing was changed"
        ) from None
    finally:
        draft.unlink(missing_ok=True)
    return path


def load(name: str, loaded) -> Saved:
    """Read a session for this model and preset. Raises UserError for any other file."""
    if not name.strip():
        raise UserError("[load] no file name; got an empty one")
    path = user_path(name, "load")
    path = path if path.is_file() else path_for(name, "load")
    if path.exists() and not path.is_file():  # a pipe would wait for a writer
        raise UserError(f"[load] {str(path)!r} is a folder, a pipe or a device, not a file")
    data = session.read_entries(path)
    session.check(path, data if path.suffix == ENDING else {}, loaded.name, loaded.fingerprint)
    session.check_cache(path, data, loaded.kv_name, loaded.kv)
    here = version("mlx-lm").split(".")[:2]
    if data["mlx_lm_version"].split(".")[:2] != here:
        raise UserError(
            f"[load] {str(path)!r} was saved with mlx-lm {data['mlx_lm_version']}; "
            f"its cache format differs from that of mlx-lm {version('mlx-lm')}"
        )
    try:
        cache = load_prompt_cache(str(path))
        match_fold(loaded.model, cache)
        for _, one in leaves(cache):
            if isinstance(one, CompressedKVCache):
                one.encode_by(loaded.encode)
        return session.saved_of(data, cache)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"[load] {str(path)!r} cannot be read by mlx-lm {version('mlx-lm')} "
            f"({type(error).__name__}: {error})"
        ) from None


def tokens_of(path: Path) -> list[int]:
    """The tokens of a saved session, from the header alone. Raises UserError for other files."""
    try:
        return [int(token) for token in json.loads(session.read_entries(path)["tokens"])]
    except (KeyError, TypeError, ValueError):
        raise UserError(f"[load] {str(path)!r} is not a session saved by mlxkv") from None
