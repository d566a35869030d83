"""A chat session on disk: what mlx-lm's `save_prompt_cache` writes, with the entries of `formats.saved.session`."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

import mlx.core as mx
from mlx_lm.models.cache import (
    can_trim_prompt_cache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

from mlxkv import files
from mlxkv.errors import MachineError, UserError
from mlxkv.formats.saved import session
from mlxkv.formats.saved.session import Saved
from mlxkv.models import restored
from mlxkv.models.catalog.shapes import text_config
from mlxkv.models.hooks.fold import match_fold
from mlxkv.models.hooks.probe import leaves


def save(name: str, saved: Saved, loaded) -> Path:
    """Write a session, private; the file is complete or untouched, a link in its place is replaced. Returns
    its path. Raises UserError, MachineError."""
    if not name.strip():
        raise UserError("[/save] no file name; write /save FILE")
    if not saved.tokens:
        raise UserError("[/save] nothing to save yet: the session is empty")
    path = session.path_for(name, "/save")
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"[/save] no such folder; got {str(path.parent)!r}")
    try:
        with files.written(path) as file:
            write(file, saved, loaded)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise MachineError(
            f"[/save] could not write {str(path)!r}: {reason}; nothing was changed"
        ) from None
    return path


def write(file: BinaryIO, saved: Saved, loaded) -> None:
    """Write a session to an empty file, open to write and to read. Raises OSError, RuntimeError."""
    entries = session.entries(
        saved,
        model=loaded.name,
        fingerprint=loaded.fingerprint,
        kv_name=loaded.kv_name,
        kv=loaded.kv,
        mlx_lm=version("mlx-lm"),
    )
    entries["trims"] = json.dumps(can_trim_prompt_cache(saved.cache))
    save_prompt_cache(file, saved.cache, entries)
    session.fill_checksum(file)


def load(name: str, loaded) -> Saved:
    """Read a session for this model and preset. Raises UserError for any other file."""
    return read(session.file_named(name), loaded)


def read(path: Path, loaded, follow: bool = True) -> Saved:
    """Read a session from a file, which may be a link only if `follow`. Raises UserError."""
    head = session.read_header(path, follow)
    if path.suffix != session.ENDING:
        raise head.wrong("is not a session saved by mlxkv chat")
    mlx_lm = version("mlx-lm")
    session.check(head, loaded.name, loaded.fingerprint, loaded.kv_name, loaded.kv, mlx_lm)
    saved = session.saved_of(head, None, text_config(loaded.config).get("vocab_size"))
    like = make_prompt_cache(loaded.model)
    if head.kinds != [type(cache).__name__ for cache in like]:  # mlx-lm makes what it is told
        raise head.wrong("has other caches than this model")
    try:
        saved.cache = load_prompt_cache(str(path))
        match_fold(loaded.model, saved.cache)
        loaded.model(mx.array([[0]]), cache=like)  # for its shapes alone: nothing is computed
        for (_, restored_cache), (_, fresh) in zip(leaves(saved.cache), leaves(like), strict=True):
            restored.check(restored_cache, fresh, len(saved.tokens))
    except UserError as error:
        raise head.wrong(f"cannot be used: {error}") from None
    except Exception as error:  # what others wrote may make MLX and mlx-lm raise anything
        reason = session.printable(str(error))
        raise head.wrong(
            f"cannot be read by mlx-lm {mlx_lm} ({type(error).__name__}: {reason})"
        ) from None
    return saved


def about(path: Path) -> tuple[list[int], bool]:
    """The tokens of a saved session, and whether it can be cut back to a part of them, from the header
    alone. Raises UserError for other files, and links."""
    head = session.read_header(path, follow=False)
    return session.tokens_of(head), head.entries.get("trims") != "false"
