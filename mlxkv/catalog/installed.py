"""Find models that other programs keep on this machine: LM Studio's folders and ollama's files, by their own names.

Nothing is written there, and no framework is imported here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mlxkv import untrusted
from mlxkv.catalog.gguf.header import MAGIC, is_gguf
from mlxkv.errors import UserError

GGUF = ".gguf"
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")  # of llama.cpp's gguf-split
SIDE = "mmproj"  # the images' side of a model, which lies beside it
OLLAMA = "ollama/"  # before a name of ollama's
MANIFEST, CONFIG = 1 << 20, 4 << 20  # most bytes of one
MODEL = "application/vnd.ollama.image.model"  # the type of a manifest's weights
HOSTED = "registry.ollama.ai", "library"  # what ollama leaves out of names
WRONG = {  # what is saved as a .gguf by mistake, by its first bytes
    b"version https://git-lfs": "is a Git LFS pointer, not the model; fetch it by git lfs pull",
    b"<!doctype html": "is a web page, not the model; use the page's download link",
    b"<html": "is a web page, not the model; use the page's download link",
    b"PK\x03\x04": "is a zip archive; unpack it first",
}
SIZE = re.compile(rb"\nsize (\d{1,15})\n")  # of a Git LFS pointer


@dataclass(frozen=True)
class Installed:
    """A model of another program. name: what --model takes. file: its folder, or GGUF file. size: its bytes."""

    name: str
    program: str
    file: Path
    size: int


def choose_gguf(folder: Path) -> Path | None:
    """Return the GGUF file that a folder without config.json is for, None if it has none. Raises UserError for several,
    and for the parts of one."""
    if (folder / "config.json").exists():
        return None
    found = _files(folder)
    if len(found) == 1 and not PART.search(found[0].name):
        return found[0]
    names = ", ".join(file.name for file in found[:8])
    if found and all(PART.search(file.name) for file in found):
        raise UserError(
            f"[--model] a model in several files is not read; got {names} in {folder}; join them by llama.cpp's "
            "gguf-split --merge"
        )
    if found:
        raise UserError(
            f"[--model] several models lie there; got {folder} with {names}; choose one by its file"
        )
    if inside := _below(folder):
        names = ", ".join(str(path.relative_to(folder)) for path in inside[:8])
        raise UserError(
            f"[--model] this folder holds folders of models; got {folder} with {names}; choose one of them"
        )
    return None


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob(f"*{GGUF}"))
    return [file for file in found if file.is_file() and not file.name.startswith(SIDE)]


def _below(folder: Path) -> list[Path]:
    """Return the folders of models one and two levels down."""
    found = []
    with suppress(OSError):
        for pattern in ("*", "*/*"):
            paths = (path for path in folder.glob(pattern) if path.is_dir())
            found += [path for path in paths if (path / "config.json").exists() or _files(path)]
    return sorted(found)


def why_no_gguf(file: Path) -> str:
    """Return what a file that is named as a model is instead, and the way on."""
    try:
        with untrusted.opened(file) as stream:
            head = stream.read(1024)
    except (OSError, untrusted.Unsound) as error:
        return f"cannot be read ({error})"
    for start, why in WRONG.items():
        if head.lstrip()[: len(start)].lower() == start.lower():
            size = SIZE.search(head) if b"git-lfs" in start else None
            return f"{why} ({int(size[1]):,} bytes)" if size else why
    if not head:
        return "is empty; fetch it again"
    if file.suffix == GGUF:
        return f"does not begin as GGUF files do; got {head[:8]!r} at its start; fetch it again"
    return (
        "is no GGUF file; a model is a GGUF file, or a folder in the hub's format: name its folder"
    )


# -- LM Studio


def lm_studio_folders() -> list[Path]:
    """Return where LM Studio keeps models, OWNER/NAME each."""
    home = Path.home()
    return [home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]


def of_lm_studio(name: str) -> Path | None:
    """Return the folder of `OWNER/NAME`, or None."""
    for root in lm_studio_folders():
        folder = root / name
        if folder.is_dir():
            return folder
    return None


def _lm_studio() -> Iterator[Installed]:
    for root in lm_studio_folders():
        for folder in _below(root):
            name = str(folder.relative_to(root))
            if (folder / "config.json").exists():
                parts = [file for file in folder.glob("*.safetensors") if file.is_file()]
                yield Installed(name, "LM Studio", folder, sum(x.stat().st_size for x in parts))
                continue
            files = _files(folder)
            for file in files:
                named = name if len(files) == 1 else str(file)
                yield Installed(named, "LM Studio", file, file.stat().st_size)


# -- ollama


def ollama_folder() -> Path:
    return Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models")


def of_ollama(name: str) -> Path | None:
    """Return the file of a model by the name that ollama shows, such as qwen3:4b; None if it has no such model.

    Raises UserError for a manifest that names no file on this machine.
    """
    base, _, tag = name.removeprefix(OLLAMA).partition(":")
    parts = base.split("/")
    if not all(re.fullmatch(r"[\w][\w.-]{0,127}", part) for part in (*parts, tag or "latest")):
        return None
    place = [*HOSTED[: max(0, 3 - len(parts))], *parts]
    manifest = ollama_folder() / "manifests" / Path(*place) / (tag or "latest")
    return _weights(manifest, name) if manifest.is_file() else None


def _weights(manifest: Path, name: str) -> Path:
    """Return the file of weights that a manifest names."""
    try:
        layers = untrusted.read_json(manifest, MANIFEST)["layers"]
        digest = next(x["digest"] for x in layers if x["mediaType"] == MODEL)
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, StopIteration):  # Unsound is a ValueError
        raise UserError(
            f"[--model] ollama's list of this model's files is damaged; got {name}; run ollama pull {name}"
        ) from None
    blob = ollama_folder() / "blobs" / digest.replace(":", "-")
    if not is_gguf(blob):
        raise UserError(
            f"[--model] its weights are not on this machine as one GGUF file; got {name}, {blob.name[:20]}...; run "
            f"ollama pull {name}"
        )
    return blob


def _ollama() -> Iterator[Installed]:
    root = ollama_folder() / "manifests"
    for manifest in sorted(root.glob("*/*/*/*")):
        host, owner, base, tag = manifest.relative_to(root).parts
        shown = [*([host] if host != HOSTED[0] else []), owner, base]
        if (host, owner) == HOSTED:
            shown = [base]
        name = f"{'/'.join(shown)}:{tag}"
        with suppress(UserError, OSError):
            file = _weights(manifest, name)
            yield Installed(f"{OLLAMA}{name}", "ollama", file, file.stat().st_size)


def installed() -> list[Installed]:
    """Return the models of other programs on this machine."""
    return [*_lm_studio(), *_ollama()]


def architecture(file: Path) -> str | None:
    """Return the architecture of a GGUF file; None if it cannot be read. Takes no longer for large vocabularies."""
    with suppress(OSError, untrusted.Unsound), untrusted.opened(file) as stream:
        head = stream.read(1 << 12)
        # The first value of every converter's file: its name, the type of a text, its length, the text.
        at = head.find(b"general.architecture\x08\x00\x00\x00")
        if head.startswith(MAGIC) and at >= 0:
            at += len("general.architecture") + 4
            size = int.from_bytes(head[at : at + 8], "little")
            return head[at + 8 : at + 8 + size].decode("utf-8", "replace") if size < 64 else None
    return None


def model_type(folder: Path) -> str | None:
    """Return the model_type of a folder's config.json, None without one."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # Unsound is a ValueError
        return str(untrusted.read_json(folder / "config.json", CONFIG, infinity=True)["model_type"])
    return None


def in_mlx_lm(kind: str) -> bool:
    """Return whether mlx-lm has a model_type, by its files: importing it takes seconds."""
    if (found := find_spec("mlx_lm")) is None or found.origin is None:
        return False
    folder = Path(found.origin).parent
    aliases = (folder / "utils.py").read_text("utf-8")  # MODEL_REMAPPING = {"mistral": "llama", ...
    return (folder / "models" / f"{Path(kind).name}.py").is_file() or f'"{kind}": "' in aliases
