"""Session files: crafted ones, odd files in their place, private ones, writes that fail."""

from __future__ import annotations

import os
import resource
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx

from experiments.attack import _crafted
from experiments.attack.frame import Attempt, command
from experiments.fixtures import QWEN, TINY
from mlxkv.errors import MachineError, UserError
from mlxkv.models import load, prompt_cache
from mlxkv.models.generate import new_cache

LIMIT = 2.0  # seconds of this process until a file is refused
# Kinds of caches: (model, preset, tokens), and only every so many of their cases in the short form.
KINDS = {
    "windows and pages": (TINY, "int4", 540, 6),
    "windows in full precision": (TINY, "fp16", 100, 25),
    "calibrated pages": (TINY, "int2", 300, 40),
    "a basis that follows": (QWEN, "oja-0.75+int4", 300, 25),
    "pages that are selected": (QWEN, "int4+keep0.5", 300, 40),
}


def attempts(short: bool) -> Iterator[Attempt]:
    before = os.umask(0)  # the least private that a shell may be
    try:
        with TemporaryDirectory() as folder:
            for kind, (model, kv, count, every) in KINDS.items():
                yield from _crafted_files(
                    Path(folder), kind, model, kv, count, every if short else 1
                )
            yield from _odd_files(Path(folder), short)
        with TemporaryDirectory() as folder:
            yield from _saving(Path(folder))
        with TemporaryDirectory() as folder:
            yield from _private(Path(folder))
    finally:
        os.umask(before)


def talk(loaded, count: int) -> prompt_cache.Saved:
    """A conversation of so many tokens, which are always the same."""
    cache, tokens = new_cache(loaded), mx.random.randint(3, 60, (1, count), key=mx.random.key(1))
    for start in range(0, count, 256):
        loaded.model(tokens[:, start : start + 256], cache=cache)
        mx.eval([one.state for one in cache])
    return prompt_cache.Saved(cache, tokens[0].tolist(), [{"role": "user", "content": "hi"}], "hi")


def _crafted_files(
    folder: Path, kind: str, model: str, kv: str, count: int, every: int
) -> Iterator[Attempt]:
    loaded = load(model, kv)
    path = prompt_cache.save(str(folder / "good"), talk(loaded, count), loaded)
    good = path.read_bytes()
    bad = folder / "bad.safetensors"
    bad.write_bytes(_crafted.Crafted(good).file())
    same = prompt_cache.read(bad, loaded).tokens == prompt_cache.read(path, loaded).tokens
    yield Attempt(f"{kind}: one that is only signed again is read", same)
    for name, data in _crafted.cases(good, every):
        bad.write_bytes(data)
        yield _refused(f"{kind}: {name}", lambda: prompt_cache.read(bad, loaded), str(bad))


def _refused(name: str, use: Callable[[], object], named: str) -> Attempt:
    """Held: one line that names the file, without control characters, in time."""
    start = time.process_time()
    try:
        use()
        return Attempt(name, False, "it was used")
    except UserError as error:
        said, seconds = str(error), time.process_time() - start
        held = said.startswith("[") and named in said and said.isprintable() and seconds < LIMIT
        return Attempt(name, held, f"after {seconds:.1f} s: {said[-160:]}")
    except Exception as error:
        return Attempt(name, False, f"{type(error).__name__}: {error}"[:200])


def _odd_files(folder: Path, short: bool) -> Iterator[Attempt]:
    loaded, path = load(TINY, "int4"), folder / "odd.safetensors"
    for name, put in _crafted.odd_files(folder, path.name):
        put()
        yield _refused(f"{name} is loaded", lambda: prompt_cache.load(str(path), loaded), path.name)
        if name == "a named pipe" or not short:
            ran = command("chat", "--load", str(path), "--prompt", "hi", "--max-tokens", "1")
            yield Attempt(f"chat --load of {name}", ran.one_line, ran.note)
        (os.rmdir if path.is_dir() and not path.is_symlink() else os.unlink)(path)


def _saving(folder: Path) -> Iterator[Attempt]:
    """What /save does to its target."""
    loaded = load(TINY, "int4")
    saved = talk(loaded, 40)
    path = prompt_cache.save(str(folder / "talk"), saved, loaded)
    yield _mode("a session is nobody else's", path, 0o600)
    path.chmod(0o666)
    prompt_cache.save(str(path), saved, loaded)
    yield _mode("nor one that was open to all before", path, 0o600)
    victim = folder / "victim"
    victim.write_bytes(b"of somebody else")
    path.unlink()
    path.symlink_to(victim)
    prompt_cache.save(str(path), saved, loaded)
    kept = victim.read_bytes() == b"of somebody else" and not path.is_symlink()
    yield Attempt("a link in place of the file is replaced, not followed", kept)
    before = path.read_bytes()
    for size in (0, 1, 100, 5000, len(before) - 1):
        with _largest_file(size):
            yield _kept(f"a disk that is full after {size} bytes", path, before, saved, loaded)
    for name in ("fsync", "replace"):
        with _failing(name):
            yield _kept(f"a disk whose {name} fails", path, before, saved, loaded)
    (folder / "folder.safetensors").mkdir()
    try:
        prompt_cache.save(str(folder / "folder"), saved, loaded)
        yield Attempt("a folder in place of the file", False, "it was replaced")
    except (UserError, MachineError) as error:
        yield Attempt("a folder in place of the file", str(error).startswith("[/save]"), str(error))
    left = sorted(os.listdir(folder))
    wanted = ["folder.safetensors", "talk.safetensors", "victim"]
    yield Attempt("no draft is left", left == wanted, str(left))


def _kept(name: str, path: Path, before: bytes, saved, loaded) -> Attempt:
    try:
        prompt_cache.save(str(path), saved, loaded)
        return Attempt(name, False, "no error")
    except MachineError as error:
        whole = path.read_bytes() == before and len(saved.tokens) == 40
        return Attempt(name, whole and "nothing was changed" in str(error), str(error))


@contextmanager
def _largest_file(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def _failing(name: str) -> Iterator[None]:
    real = getattr(os, name)

    def fails(*args, **kwargs):
        raise OSError(5, "Input/output error")

    setattr(os, name, fails)
    try:
        yield
    finally:
        setattr(os, name, real)


def _private(folder: Path) -> Iterator[Attempt]:
    """What mlxkv keeps for a user."""
    from mlxkv.chat.terminal import History
    from mlxkv.formats.calibration import artifact

    before = os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME")
    os.environ |= {"XDG_CACHE_HOME": str(folder / "home" / "cache"), "HOME": str(folder / "home")}
    try:
        with History():
            pass
        made = artifact.read(load(TINY, "fp16").path)
        artifact.write(folder / "of" / "mine" / "c.safetensors", made)
    finally:
        for name, value in zip(("XDG_CACHE_HOME", "HOME"), before, strict=True):
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    for path in sorted(folder.rglob("*")):
        what = "folder" if path.is_dir() else "file"
        name = path.relative_to(folder)
        yield _mode(f"the {what} {name} is nobody else's", path, 0o700 if path.is_dir() else 0o600)


def _mode(name: str, path: Path, wanted: int) -> Attempt:
    mode = stat.S_IMODE(os.lstat(path).st_mode)
    return Attempt(name, mode == wanted, oct(mode))
