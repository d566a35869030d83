"""Sessions on disk: caches that memory has no room for, found again, also after a restart.

Each is a file of `mlxkv.models.prompt_cache`, which is whole or not there, private, and checked when it is
read. A file that is damaged, or of another model, preset or version, is not used: it costs its session,
and neither a start nor a request.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from weakref import finalize

from mlx_lm.models.cache import can_trim_prompt_cache

from mlxkv import files
from mlxkv.errors import UserError
from mlxkv.formats.saved import session
from mlxkv.models import prompt_cache
from mlxkv.serve.ranks import Ranks

SUFFIX = session.ENDING
ASIDE = ".bad"  # the ending of files that could not be used, which stay until the next start
WHERE = "--kv-disk"


@dataclass
class Entry:
    """A file. tokens: those in its cache. trims: whether it can be cut back to a part of them. tenant: whose
    it is, as its name tells."""

    path: Path
    tokens: list[int]
    nbytes: int
    trims: bool = True

    @property
    def tenant(self) -> str:
        return self.path.stem.rpartition("-")[0]


class Disk:
    """Files of one model and preset in a folder below `base`, of at most `limit` bytes together: the least
    recently used are removed first. loaded: the model. Raises UserError where it cannot write, where others
    can, and where another process keeps its sessions.

    saved, found, failed: counts. entries: the least recently used first. close: lets others have the folder.
    """

    def __init__(self, base: Path, limit: int, loaded):
        lm = version("mlx-lm").split(".")[:2]
        self.folder = base / _digest([loaded.fingerprint, loaded.kv.as_dict(), lm])
        self.limit, self.loaded = limit, loaded
        self.saved = self.found = self.failed = 0
        os.close(files.own_folder(base, WHERE))
        self._handle = files.own_folder(self.folder, WHERE)
        self.close = finalize(self, os.close, self._handle)
        self._lock()
        self.entries = self._scan()
        self._bound()

    def _lock(self) -> None:
        """Keep other servers out: they would not count these files, and take drafts for left behind."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UserError(
                f"[{WHERE}] another server keeps its sessions there; got {str(self.folder)!r}; wait "
                "until it has ended, or choose another folder"
            ) from None
        except OSError:
            pass  # a file system without locks

    def _scan(self) -> list[Entry]:
        """Read the headers of all files, the oldest first. Sweeps away what servers have left that were killed
        while saving, and what was set aside before."""
        found = []
        for name in os.listdir(self._handle):
            if (
                name.startswith(".")
                and name.endswith((files.DRAFT, SUFFIX))
                or name.endswith(ASIDE)
            ):
                self._remove(name)
            elif name.endswith(SUFFIX):
                with suppress(OSError):
                    about = os.stat(name, dir_fd=self._handle, follow_symlinks=False)
                    found.append((about.st_mtime, name, about.st_size))
        return [entry for _, name, size in sorted(found) if (entry := self._read(name, size))]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in list(self.entries))

    def _read(self, name: str, size: int) -> Entry | None:
        """Read the header of a file; None if it is damaged, or no session."""
        path = self.folder / name
        try:
            tokens, trims = prompt_cache.about(path)
            return Entry(path, tokens, size, trims)
        except Exception as error:  # whatever it is, the server starts
            self.failed += 1
            logging.warning(f"a session cannot be read, it is left alone: {error}")
            return None

    def save(self, tokens: list[int], cache: list, tenant: str = "") -> None:
        """Write a cache. One that cannot be written is lost, and logged."""
        name = f"{tenant}-{_digest(tokens)}" if tenant else _digest(tokens)
        path = self.folder / (name + SUFFIX)
        known = next((entry for entry in self.entries if entry.path == path), None)
        if known is not None:
            self._touch(known)
            return
        saved = prompt_cache.Saved(cache, tokens, messages=[], text="", raw=True)
        try:
            with files.written(path, self._handle) as file:
                prompt_cache.write(file, saved, self.loaded)
                size = os.fstat(file.fileno()).st_size
        except (OSError, RuntimeError) as error:
            self.failed += 1
            logging.warning(f"a session could not be kept: {error}")
            return
        self.saved += 1
        trims = can_trim_prompt_cache(cache)
        if trims:  # else a start of it serves where it cannot: a window has moved on
            own = [entry for entry in self.entries if entry.tenant == tenant]
            self._drop([e for e in own if tokens[: len(e.tokens)] == e.tokens])
        self.entries.append(Entry(path, tokens, size, trims))
        self._bound()

    def _touch(self, entry: Entry) -> None:
        self.entries.remove(entry)
        self.entries.append(entry)
        with suppress(OSError):  # only the order after a restart is lost
            os.utime(entry.path.name, dir_fd=self._handle, follow_symlinks=False)

    def _drop(self, entries: list[Entry]) -> None:
        for entry in entries:
            self.entries.remove(entry)
            self._remove(entry.path.name)

    def _remove(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self._handle)
        except FileNotFoundError:
            pass
        except OSError as error:  # the folder is read-only now, or this is one
            logging.warning(f"{name!r} could not be removed: {error}")

    def _bound(self) -> None:
        while self.entries and self.nbytes > self.limit:
            self._drop(self.entries[:1])

    def nearest(self, tokens: list[int], tenant: str = "") -> tuple[Entry | None, int]:
        """The tenant's file that shares the longest start with `tokens`, and the length of that start. One
        that cannot be cut back has to be that start, with a token behind it for the model to read."""
        best, most = None, 0
        for entry in self.entries:
            if entry.tenant != tenant:
                continue
            shared = _shared(entry.tokens, tokens)
            usable = entry.trims or shared == len(entry.tokens) < len(tokens)
            if usable and shared > most:
                best, most = entry, shared
        return best, most

    def load(self, entry: Entry) -> list | None:
        """Read a cache. None if it cannot be used: then the file is set aside."""
        try:
            saved = prompt_cache.read(entry.path, self.loaded, follow=False)
            if saved.tokens != entry.tokens:
                raise UserError(f"[load] {str(entry.path)!r} was replaced by another session")
        except Exception as error:  # whatever it is, the request is read afresh
            self.failed += 1
            logging.warning(f"a session could not be used, it is set aside: {error}")
            self._set_aside(entry)
            return None
        self.found += 1
        entry.trims = can_trim_prompt_cache(saved.cache)  # files of earlier versions do not tell
        self._touch(entry)
        return saved.cache

    def _set_aside(self, entry: Entry) -> None:
        self.entries.remove(entry)
        name, at = entry.path.name, self._handle
        with suppress(OSError):
            os.replace(name, name + ASIDE, src_dir_fd=at, dst_dir_fd=at)


class Agreed(Disk):
    """The files of one of several processes, which hold its share of the kv heads. A session is used
    only if every process has its file."""

    def __init__(self, base: Path, limit: int, loaded, ranks: Ranks):
        os.close(files.own_folder(base, WHERE))
        super().__init__(base / f"{ranks.rank + 1}-of-{ranks.size}", limit, loaded)
        self._ranks = ranks

    def nearest(self, tokens: list[int], tenant: str = "") -> tuple[Entry | None, int]:
        entry, shared = super().nearest(tokens, tenant)
        name, shared = self._ranks.share([entry and entry.path.name, shared])
        own = next((entry for entry in self.entries if entry.path.name == name), None)
        if self._ranks.least(own is not None):
            return own, shared
        self._drop([own] if own is not None else [])
        return None, 0

    def load(self, entry: Entry) -> list | None:
        cache = super().load(entry)
        if self._ranks.least(cache is not None):
            return cache
        self._drop([entry] if cache is not None else [])
        return None


def open_disk(base: Path, limit: int, loaded, ranks: Ranks) -> Disk:
    """Open the sessions of this process. Raises UserError."""
    return Agreed(base, limit, loaded, ranks) if ranks.many else Disk(base, limit, loaded)


def _digest(data: list) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:32]


def _shared(a: list[int], b: list[int]) -> int:
    """The length of the common start."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # comparing slices is fast
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
