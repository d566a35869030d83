"""The server's folder of sessions: who may write there, what lies in it, disks that fail, what is found again."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory

import mlx.core as mx

from experiments.attack import _crafted
from experiments.attack.frame import Attempt, alive, command, server
from experiments.attack.sessions import talk
from experiments.fixtures import TINY
from mlxkv.errors import UserError
from mlxkv.models import load
from mlxkv.models.generate import new_cache
from mlxkv.serve.caches.disk import Disk
from mlxkv.serve.caches.memory import Memory, shapes_of
from mlxkv.serve.caches.sessions import Sessions

ROOM = 1 << 30
LIMIT = 2.0  # seconds of this process for a look at one bad file


def attempts(short: bool) -> Iterator[Attempt]:
    before = os.umask(0)
    logging.disable(logging.CRITICAL)  # what is set aside is counted here
    try:
        loaded = load(TINY, "int4")
        with TemporaryDirectory() as folder:
            yield from _folders(Path(folder), loaded)
        with TemporaryDirectory() as folder:
            yield from _odd(Path(folder), loaded, short)
        for count, every in ((540, 20), (100, 60)):
            with TemporaryDirectory() as folder:
                yield from _crafted_files(Path(folder), loaded, count, every if short else 1)
        with TemporaryDirectory() as folder:
            yield from _failing_disks(Path(folder), loaded, short)
        with TemporaryDirectory() as folder:
            yield from _found(Path(folder), loaded, short)
        with TemporaryDirectory() as folder:
            yield from _servers(Path(folder), short)
    finally:
        logging.disable(logging.NOTSET)
        os.umask(before)


def _place(base: Path, loaded) -> Path:
    """The folder that a disk has below `base`."""
    disk = Disk(base, ROOM, loaded)
    disk.close()
    return disk.folder


def _folders(top: Path, loaded) -> Iterator[Attempt]:
    disk = Disk(top / "a" / "b", ROOM, loaded)
    saved = talk(loaded, 40)
    disk.save(saved.tokens, saved.cache)
    for path in (top / "a", top / "a" / "b", disk.folder, disk.entries[0].path):
        mode = stat.S_IMODE(os.lstat(path).st_mode)
        name = (
            f"{'a folder' if path.is_dir() else 'a session'} that the server makes is nobody else's"
        )
        yield Attempt(name, mode == (0o700 if path.is_dir() else 0o600), oct(mode))
    yield _refused("a second server on one folder", top / "a" / "b", loaded)
    disk.close()
    for bits in (0o777, 0o770, 0o707, 0o720, 0o702, 0o1777):
        base = top / oct(bits)
        base.mkdir()
        base.chmod(bits)
        yield _refused(f"a folder of mode {bits:o}", base, loaded)
    for bits in (0o777, 0o702):
        base = top / f"inner {bits:o}"
        _place(base, loaded).chmod(bits)
        yield _refused(f"a folder of sessions of mode {bits:o}", base, loaded)
    (top / "elsewhere").mkdir(mode=0o700)
    base = top / "inner link"
    inner = _place(base, loaded)
    inner.rmdir()
    inner.symlink_to(top / "elsewhere")
    yield _refused("a link in place of the folder of sessions", base, loaded)
    (top / "link").symlink_to("elsewhere")
    yield _refused("a link to a folder", top / "link", loaded)
    for name, put in _crafted.odd_files(top, "odd"):
        put()
        yield _refused(f"{name} as the folder", top / "odd", loaded)
        if (top / "odd").is_dir() and not (top / "odd").is_symlink():
            rmtree(top / "odd")
        else:
            os.unlink(top / "odd")
    if os.geteuid() == 0:
        (top / "theirs").mkdir(mode=0o700)
        os.chown(top / "theirs", 12345, 12345)
        yield _refused("a folder of another user", top / "theirs", loaded)
    yield Attempt("nothing was written elsewhere", os.listdir(top / "elsewhere") == [])


def _refused(name: str, base: Path, loaded) -> Attempt:
    """Held: it is refused in one line."""
    try:
        Disk(base, ROOM, loaded).close()
        return Attempt(name, False, "it was used")
    except UserError as error:
        said = str(error)
        return Attempt(name, said.startswith("[--kv-disk]") and said.isprintable(), said)


def _odd(base: Path, loaded, short: bool) -> Iterator[Attempt]:
    """What lies in the folder does not stop a start."""
    folder, saved = _place(base, loaded), talk(loaded, 40)
    disk = Disk(base, ROOM, loaded)
    disk.save(saved.tokens, saved.cache)
    disk.close()
    places = ("odd.safetensors", ".odd.safetensors", ".odd.draft", "odd.safetensors.bad")
    for place in places[:2] if short else places:
        for name, put in _crafted.odd_files(folder, place):
            put()
            path = folder / place
            try:
                disk = Disk(base, ROOM, loaded)
                whole = [entry.tokens for entry in disk.entries] == [saved.tokens]
                usable = disk.load(disk.entries[0]) is not None
                counted = disk.failed == (place == "odd.safetensors")
                disk.close()
                note = f"{whole}, {usable}, {disk.failed} counted"
                yield Attempt(f"{name} called {place}", whole and usable and counted, note)
            except Exception as error:
                yield Attempt(f"{name} called {place}", False, f"{type(error).__name__}: {error}")
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)


def _crafted_files(base: Path, loaded, count: int, every: int) -> Iterator[Attempt]:
    """A bad session is set aside and the request read afresh; the next ones, too."""
    folder, saved = _place(base, loaded), talk(loaded, count)
    disk = Disk(base, ROOM, loaded)
    disk.save(saved.tokens, saved.cache)
    disk.close()
    path, memory = disk.entries[0].path, Memory(ROOM, shapes_of(talk(loaded, 1).cache), 256)
    good, asked = path.read_bytes(), [*saved.tokens, 7]
    for name, data in _crafted.cases(good, every):
        path.write_bytes(data)
        start, note = time.process_time(), ""
        try:
            disk = Disk(base, ROOM, loaded)
            sessions = Sessions(memory, lambda: new_cache(loaded), disk)
            found = [len(sessions.fetch_nearest_cache("m", asked)[1]) for _ in range(2)]
            held = found == [len(asked)] * 2 and len(disk.entries) <= 1
            held = held and disk.found == 0
            note = f"{found} of {len(asked)} read, {disk.failed} counted"
            disk.close()
        except Exception as error:
            held, note = False, f"{type(error).__name__}: {error}"[:200]
        seconds = time.process_time() - start
        yield Attempt(
            f"{count} tokens: {name}", held and seconds < LIMIT, f"{note}, {seconds:.1f} s"
        )
        for left in folder.iterdir():
            left.unlink()


@contextmanager
def _failing(name: str, number: int) -> Iterator[None]:
    real = getattr(os, name)

    def fails(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    setattr(os, name, fails)
    try:
        yield
    finally:
        setattr(os, name, real)


def _failing_disks(base: Path, loaded, short: bool) -> Iterator[Attempt]:
    """Writes that fail cost the session that was to be written, and no other."""
    disk, kept, lost = Disk(base, ROOM, loaded), talk(loaded, 40), talk(loaded, 50)
    disk.save(kept.tokens, kept.cache)
    for name in ("open", "fsync", "replace", "unlink", "utime", "stat", "fstat"):
        # Full, a fault of the device, read-only, too many files.
        for number in (28,) if short else (28, 5, 30, 24):
            before = disk.failed
            with _failing(name, number):
                try:
                    disk.save([9, *lost.tokens], lost.cache)
                    disk._touch(disk.entries[0])
                    note = ""
                except OSError as error:
                    note = f"{error}"
            for entry in [entry for entry in disk.entries if entry.tokens != kept.tokens]:
                disk._drop([entry])
            whole = disk.load(disk.entries[0]) is not None and len(disk.entries) == 1
            drafts = [one for one in os.listdir(disk.folder) if one.startswith(".")]
            swept = not drafts or name == "unlink"
            fine = disk.failed in (before, before + 1) and not note
            yield Attempt(
                f"{name} fails with {number}", whole and swept and fine, f"{note} {drafts}"
            )
            for draft in drafts:
                os.unlink(disk.folder / draft)
    each = disk.entries[0].nbytes
    disk.limit = 3 * each
    for i in range(6):
        disk.save([i, *kept.tokens], kept.cache)
    bytes_there = sum(path.stat().st_size for path in disk.folder.iterdir())
    yield Attempt("--kv-disk-size bounds the files", bytes_there <= disk.limit, str(bytes_there))
    disk.close()


def _found(base: Path, loaded, short: bool) -> Iterator[Attempt]:
    """The same prompts reuse after a restart what they did before, also beyond the sliding window."""
    memory = Memory(ROOM, shapes_of(talk(loaded, 1).cache), 256)
    disk = Disk(base, ROOM, loaded)
    sessions = Sessions(memory, lambda: new_cache(loaded), disk)
    counts = (100, 520) if short else (100, 480, 520, 700)
    prompts = [[100 + count, *[7] * count] for count in counts]
    for prompt in prompts:
        for tokens in (prompt[:-1], [*prompt, 5, 6, 7]):  # a prompt, and it with its reply
            cache = new_cache(loaded)
            for start in range(0, len(tokens), 256):
                loaded.model(mx.array([tokens[start : start + 256]]), cache=cache)
                mx.eval([one.state for one in cache])
            sessions.insert_cache("m", tokens, cache)
    before = [len(sessions.fetch_nearest_cache("m", prompt)[1]) for prompt in prompts]
    sessions.close()
    sessions = Sessions(memory, lambda: new_cache(loaded), Disk(base, ROOM, loaded))
    for prompt, rest in zip(prompts, before, strict=True):
        read = len(sessions.fetch_nearest_cache("m", prompt)[1])
        name = f"a prompt of {len(prompt)} tokens after a restart"
        yield Attempt(name, read == rest < len(prompt) // 2, f"{read} read, {rest} before")
    sessions.disk.close()


def _servers(base: Path, short: bool) -> Iterator[Attempt]:
    """A real server in a folder of the worst."""
    loaded = load(TINY, "int4")
    folder = _place(base, loaded)
    for i, (_, put) in enumerate(_crafted.odd_files(folder, "odd.safetensors")):
        put()
        os.rename(folder / "odd.safetensors", folder / f"{i}.safetensors")
    with server("--kv-disk", str(base)) as running:
        yield Attempt("a server starts beside all that may lie there", alive(running.port))
        ran = command("serve", "--model", TINY, "--port", "0", "--kv-disk", str(base))
        yield Attempt("a second server is refused in one line", ran.one_line, ran.note)
        yield Attempt("and the first goes on", alive(running.port))
    if not short:
        os.chmod(base, 0o777)
        ran = command("serve", "--model", TINY, "--port", "0", "--kv-disk", str(base))
        yield Attempt("a server in a folder open to all", ran.one_line, ran.note)
