"""Check a model folder in the hub's format before the heavy work; every fault is one line.

No framework is imported here: this reads JSON and the first bytes of weight files only.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from mlxkv.errors import UserError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
INDEX = "model.safetensors.index.json"
HEADER_LIMIT = 100 << 20  # the format's own limit
SAMPLE = 64 << 10  # bytes hashed at both ends of a file


@dataclass(frozen=True)
class Folder:
    """A checked folder with its config.json and its weight files."""

    path: Path
    config: dict
    weights: list[Path]


def check(path: Path) -> Folder:
    """Check the folder at `path`. Raises UserError for the first fault found."""
    config = _json(path / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise UserError(
            f"[load] config.json names no model_type; got {path / 'config.json'}; is this a "
            "language model?"
        )
    if "model_file" in config:
        raise UserError(
            f"[load] this model wants to run code of its own ({config['model_file']}); got {path}; "
            "mlxkv never runs code that comes with a model"
        )
    weights = _weights(path)
    for file in weights:
        check_safetensors(file)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        needed = ", ".join(TOKENIZER_FILES)
        raise UserError(f"[load] the tokenizer is missing; got {path}; it needs one of {needed}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (path / name).is_file():
            _json(path / name)
    return Folder(path, config, weights)


def _json(file: Path) -> dict:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"[load] {file.name} is missing; got {file.parent}; choose a model folder in the hub's "
            "format"
        ) from None
    except OSError as error:
        raise UserError(
            f"[load] {file.name} cannot be read ({error.strerror}); got {file}; check the file"
        ) from None
    except ValueError as error:  # bad JSON or bad UTF-8
        raise UserError(
            f"[load] {file.name} is not valid JSON ({error}); got {file}; fetch the file again"
        ) from None
    if not isinstance(data, dict):
        raise UserError(
            f"[load] {file.name} is not a JSON object; got a {type(data).__name__} in {file}; "
            "fetch it again"
        )
    return data


def _weights(path: Path) -> list[Path]:
    files = sorted(path.glob("model*.safetensors"))
    if (path / INDEX).is_file():
        table = _json(path / INDEX).get("weight_map")
        named = set(table.values()) if isinstance(table, dict) else set()
        if missing := sorted(named - {file.name for file in files}):
            raise UserError(
                f"[load] {len(missing)} of {len(named)} weight files are missing; got {path} "
                f"without {missing[0]}; "
                "fetch the model again"
            )
    if files:
        return files
    others = sorted(
        f.name for f in path.iterdir() if f.suffix in (".bin", ".gguf", ".pth", ".safetensors")
    )
    what = f"only {others[0]}" if others else "no weights at all"
    raise UserError(
        f"[load] model*.safetensors is missing; got {what} in {path}; convert the model with "
        "mlx_lm.convert"
    )


def check_safetensors(file: Path) -> dict:
    """Return the header of a safetensors file. Raises UserError if it disagrees with the file's size."""

    def broken(what: str) -> UserError:
        return UserError(f"[load] {file.name} is broken: {what}; got {file}; fetch the file again")

    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not 2 <= length <= min(HEADER_LIMIT, size - 8):
                raise broken(f"no room for its header in {size} bytes")
            raw = stream.read(length)
    except OSError as error:
        raise broken(f"it cannot be read ({error.strerror})") from None
    try:
        header = json.loads(raw)
        spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        end = max((stop for _, stop in spans), default=0)
        whole = sum(stop - start for start, stop in spans)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise broken("its header is not valid") from None
    if 8 + length + end != size or whole != end:
        raise broken(f"its header promises {8 + length + end} bytes, it has {size}")
    return header


def fingerprint(folder: Folder, planted: bool = False) -> str:
    """16 hex digits that identify this model, in milliseconds even for large files.

    Hashed: the configuration, the headers of all weight files (names, shapes, types), 64 KiB at
    both ends of their data, the ends of the tokenizer files, and whether outliers are planted (keys
    differ then).
    """
    digest = hashlib.sha256(json.dumps(folder.config, sort_keys=True).encode())
    digest.update(b"planted" if planted else b"plain")
    tokenizers = [folder.path / name for name in TOKENIZER_FILES if (folder.path / name).is_file()]
    for file in [*folder.weights, *tokenizers]:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            start = stream.read(8)
            skip = int.from_bytes(start, "little") if file in folder.weights else 0
            digest.update(start + stream.read(min(skip, HEADER_LIMIT) + SAMPLE))
            stream.seek(max(0, size - SAMPLE))
            digest.update(stream.read(SAMPLE))
    return digest.hexdigest()[:16]
