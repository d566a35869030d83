"""Write private files: mode 0600, in folders of mode 0700, completely or not at all.

A draft in the same folder replaces the file once all of it is on disk. Folder and draft are held by descriptors and
no link is followed: a link in place of the file is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from stat import S_ISLNK
from typing import BinaryIO

from mlxkv.errors import UserError

DRAFT = ".draft"  # suffix of drafts, whose names begin with a dot
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def make_folder(path: Path) -> None:
    """Create a private folder, and missing parents. Raises OSError."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def own_folder(path: Path, where: str) -> int:
    """Open a folder for private files, created if missing, and return a descriptor. where: the option, for errors.
    Raises UserError for a link, a folder of another user or writable by others, and anything that is not a folder."""
    try:
        make_folder(path)
        if S_ISLNK(os.lstat(path).st_mode):
            raise UserError(f"[{where}] is a link; got {str(path)!r}; choose the folder itself")
        handle = os.open(path, _FOLDER | os.O_NOFOLLOW)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(
            f"[{where}] not a folder to write to; got {str(path)!r} ({reason})"
        ) from None
    try:
        found = os.fstat(handle)
        if found.st_uid != os.geteuid():
            raise UserError(
                f"[{where}] belongs to another user; got {str(path)!r}; choose a folder of your own"
            )
        if found.st_mode & 0o022:
            raise UserError(
                f"[{where}] others may write to this folder; got {str(path)!r}; take that from them "
                "(chmod go-w), or choose another"
            )
        return handle
    except BaseException:
        os.close(handle)
        raise


@contextmanager
def written(path: Path, folder: int | None = None) -> Iterator[BinaryIO]:
    """Yield a draft, open for reading and writing, that replaces `path` at the end. An error leaves `path` unchanged.
    folder: descriptor of the file's folder; by default it is opened here. Raises OSError."""
    inside = os.open(path.parent, _FOLDER) if folder is None else folder
    draft = f".mlxkv-{token_hex(8)}{DRAFT}"
    try:
        handle = os.open(draft, _NEW, 0o600, dir_fd=inside)
        try:
            with os.fdopen(handle, "w+b") as file:
                yield file
                file.flush()
                os.fsync(handle)
            os.replace(draft, path.name, src_dir_fd=inside, dst_dir_fd=inside)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft, dir_fd=inside)
            raise
        with suppress(OSError):  # not every file system can sync a folder
            os.fsync(inside)
    finally:
        if folder is None:
            os.close(inside)
