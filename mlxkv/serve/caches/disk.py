"""Sessions on disk: caches that memory has no room for, found again, also after a restart.

Each is a file of `mlxkv.models.prompt_cache`, which is whole or not there, and is checked when it is
read. A file that is damaged, or of another model, preset or version, is not used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from mlxkv.errors import MachineError, UserError
from mlxkv.models import prompt_cache
from mlxkv.serve.ranks import Ranks

SUFFIX = ".safetensors"


@dataclass
class Entry:
    """A file. tokens: those in its cache. tenant: whose it is, as its name tells."""

    path: Path
    tokens: list[int]
    nbytes: int

    @property
    def tenant(self) -> str:
        return self.path.stem.rpartition("-")[0]


class Disk:
    """Files of one model and preset in a folder below `base`, of at most `limit` bytes together: the least
    recently used are removed first. loaded: the model. Raises UserError where it cannot write.

    saved, found, failed: counts. entries: the least recently used first.
    """

    def __init__(self, base: Path, limit: int, loaded):
        lm = version("mlx-lm").split(".")[:2]
        folder = base / _digest([loaded.fingerprint, loaded.kv.as_dict(), lm])
        self.folder, self.limit, self.loaded = folder, limit, loaded
        self.saved = self.found = self.failed = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for draft in folder.glob(
                f".*{SUFFIX}"
            ):  # left by a server that was killed while saving
                draft.unlink(missing_ok=True)
            files = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
        except OSError as error:
            raise UserError(
                f"[--kv-disk] not a folder to write to; got {str(folder)!r} ({error.strerror})"
            ) from None
        self.entries = [entry for path in files if (entry := self._read(path))]
        self._bound()

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in list(self.entries))

    def _read(self, path: Path) -> Entry | None:
        """Read the header of a file; None if it is damaged, or no session."""
        try:
            return Entry(path, prompt_cache.tokens_of(path), path.stat().st_size)
        except (UserError, OSError) as error:
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
            prompt_cache.save(str(path), saved, self.loaded)
            size = path.stat().st_size
        except (MachineError, UserError, OSError) as error:
            self.failed += 1
            logging.warning(f"a session could not be kept: {error}")
            return
        self.saved += 1
        own = [entry for entry in self.entries if entry.tenant == tenant]
        self._drop([e for e in own if tokens[: len(e.tokens)] == e.tokens])
        self.entries.append(Entry(path, tokens, size))
        self._bound()

    def _touch(self, entry: Entry) -> None:
        self.entries.remove(entry)
        self.entries.append(entry)
        try:
            os.utime(entry.path)
        except OSError:
            pass  # only the order after a restart is lost

    def _drop(self, entries: list[Entry]) -> None:
        for entry in entries:
            self.entries.remove(entry)
            try:
                entry.path.unlink(missing_ok=True)
            except OSError as error:  # the folder is gone, or read-only now
                logging.warning(f"a session could not be removed: {error}")

    def _bound(self) -> None:
        while self.entries and self.nbytes > self.limit:
            self._drop(self.entries[:1])

    def nearest(self, tokens: list[int], tenant: str = "") -> tuple[Entry | None, int]:
        """The tenant's file that shares the longest start with `tokens`, and the length of that start."""
        best, most = None, 0
        for entry in self.entries:
            if entry.tenant == tenant and (shared := _shared(entry.tokens, tokens)) > most:
                best, most = entry, shared
        return best, most

    def load(self, entry: Entry) -> list | None:
        """Read a cache. None if it cannot be read: then the file is removed."""
        try:
            cache = prompt_cache.load(str(entry.path), self.loaded).cache
        except (UserError, MachineError, OSError) as error:
            self.failed += 1
            logging.warning(f"a session could not be read, it is dropped: {error}")
            self._drop([entry])
            return None
        self.found += 1
        self._touch(entry)
        return cache


class Agreed(Disk):
    """The files of one of several processes, which hold its share of the kv heads. A session is used
    only if every process has its file."""

    def __init__(self, base: Path, limit: int, loaded, ranks: Ranks):
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
