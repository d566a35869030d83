"""Check a model folder in the hub's format, or a GGUF file, before heavy work; report each fault in one line.

No framework is imported here: this reads JSON and headers of weight files, with limits (`mlxkv.untrusted`). A folder
takes well under a second.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path

from mlxkv import untrusted
from mlxkv.catalog.gguf import config as gguf
from mlxkv.catalog.shapes import check_numbers
from mlxkv.errors import UserError
from mlxkv.untrusted import TensorsHeader, Unsound

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
INDEX = "model.safetensors.index.json"
SMALL, LARGE = 16 << 20, 128 << 20  # bytes of a configuration; of a vocabulary (Gemma's has 33 MB)
# Files other than weights that mlx-lm and transformers read.
OBJECTS = ("generation_config.json", "tokenizer_config.json", "hf_quant_config.json")
OBJECTS += ("special_tokens_map.json", "added_tokens.json", "chat_template.json")
VOCABULARIES = ("tokenizer.json", "vocab.json")
READ = (".json", ".jsonl", ".txt", ".jinja", ".model", ".tiktoken", ".safetensors")
TEMPLATE = 1 << 20  # bytes of a chat template in a file of its own
ADAPTER, ADAPTER_CONFIG = "adapters.safetensors", "adapter_config.json"  # mlx-lm's
PEFT = "adapter_model.safetensors"


@dataclass(frozen=True)
class Folder:
    """A checked folder with its config.json and its weight files. headers: of the weight files, in order.

    For a GGUF file, `path` is that file, the only one of `weights`, and `config` the equivalent config.json.
    adapter: the folder of mlx-lm's adapter (LoRA) for these weights, or None.
    """

    path: Path
    config: dict
    weights: list[Path]
    headers: list[TensorsHeader]
    adapter: Path | None = None

    @property
    def is_gguf(self) -> bool:
        return self.weights == [self.path]


def check_folder(path: Path, adapter: Path | None = None) -> Folder:
    """Check the folder, or the GGUF file, at `path`, and the folder of an adapter for it. Raises UserError for the
    first fault found."""
    if adapter is not None:
        _check_adapter(adapter, path)
    found = _check_gguf(path) if path.is_file() else _check_hub(path)
    return replace(found, adapter=adapter)


def _check_adapter(adapter: Path, model: Path) -> None:
    if model.is_file():
        raise UserError(
            f"[--adapter-path] adapters are for folders in the hub's format; got the GGUF file {model}; name the "
            "folder that the adapter was made with"
        )
    for name in (ADAPTER_CONFIG, ADAPTER):
        if not (adapter / name).is_file():
            found = f"{PEFT}, of PEFT, in" if (adapter / PEFT).is_file() else "no such file in"
            raise UserError(
                f"[--adapter-path] {name} is missing; got {found} {adapter}; choose a folder that mlx_lm.lora wrote"
            )
    _json(adapter / ADAPTER_CONFIG, SMALL)
    _sound(adapter / ADAPTER, untrusted.safetensors)


def _check_hub(path: Path) -> Folder:
    config = _json(path / "config.json", SMALL)
    if not isinstance(config.get("model_type"), str):
        raise UserError(
            f"[load] config.json names no model_type; got {path / 'config.json'}; is this a "
            "language model?"
        )
    if "model_file" in config:
        raise UserError(
            f"[load] this model wants to run code of its own ({str(config['model_file'])[:80]}); got "
            f"{path}; mlxkv never runs code that comes with a model"
        )
    _no_odd_files(path)
    weights = _weights(path)
    headers = [_sound(file, untrusted.safetensors) for file in weights]
    try:
        check_numbers(config, sum(len(header.tensors) for header in headers))
    except Unsound as error:
        raise _fault(path / "config.json", error) from None
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        files = ", ".join(TOKENIZER_FILES)
        raise UserError(f"[load] the tokenizer is missing; got {path}; it needs one of {files}")
    for name in (*OBJECTS, *VOCABULARIES):
        if (path / name).exists():
            _json(path / name, LARGE if name in VOCABULARIES else SMALL)
    for file in (path / "chat_template.jinja", *path.glob("additional_chat_templates/*.jinja")):
        if file.exists():
            _sound(file, untrusted.read_tensors, TEMPLATE)
    return Folder(path, config, weights, headers)


def _check_gguf(path: Path) -> Folder:
    header, config = _sound(path, gguf.read_config)
    try:
        check_numbers(config, len(header.tensors))
    except Unsound as error:
        raise _fault(path, error) from None
    return Folder(path, config, [path], [header])


def _fault(file: Path, fault: str | Unsound) -> UserError:
    fault = fault if isinstance(fault, Unsound) else Unsound(fault)
    return UserError(f"[load] {file.name} {fault}; got {file}; {fault.way}")


def _sound(file: Path, read, *args, **options):
    """Call `read`, a function of `untrusted`, and turn its errors into UserError."""
    try:
        return read(file, *args, **options)
    except FileNotFoundError:
        raise UserError(
            f"[load] {file.name} is missing; got {file.parent}; choose a model folder in the hub's "
            "format"
        ) from None
    except Unsound as error:
        raise _fault(file, error) from None


def _json(file: Path, limit: int) -> dict:
    # Some families write Infinity into their configuration.
    data = _sound(file, untrusted.read_json, limit, infinity=True)
    if not isinstance(data, dict):
        raise _fault(file, f"is not a JSON object but a {type(data).__name__}")
    return data


def _no_odd_files(path: Path) -> None:
    """Raise UserError for a pipe, a device or a loop of links among the files that libraries read: they would block on
    it."""
    for file in sorted(path.iterdir()):
        if file.suffix not in READ:
            continue
        try:
            mode = os.stat(file).st_mode
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _fault(file, f"cannot be read ({error.strerror})") from None
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise _fault(file, "is a pipe or a device, not a file")


def _weights(path: Path) -> list[Path]:
    files = sorted(path.glob("model*.safetensors"))
    if (path / INDEX).exists():
        table = _json(path / INDEX, SMALL).get("weight_map")
        named = list(table.values()) if isinstance(table, dict) else []
        if not all(isinstance(name, str) for name in named):
            raise _fault(path / INDEX, "names files by something else than texts")
        if absent := sorted(set(named) - {file.name for file in files}):
            raise UserError(
                f"[load] {len(absent)} of {len(set(named))} weight files are missing; got {path} "
                f"without {absent[0][:80]}; fetch the model again"
            )
    if files:
        return files
    unusable = sorted(
        f.name for f in path.iterdir() if f.suffix in (".bin", ".gguf", ".pth", ".safetensors")
    )
    if any(name.endswith(".gguf") for name in unusable):
        raise UserError(
            f"[load] a model of GGUF files is named by its file; got {path}; choose --model "
            f"{path / next(name for name in unusable if name.endswith('.gguf'))}"
        )
    contents = f"only {unusable[0]}" if unusable else "no weights at all"
    raise UserError(
        f"[load] model*.safetensors is missing; got {contents} in {path}; convert the model with "
        "mlx_lm.convert"
    )


# -- the identity of a model: a hash over its configuration, its tokenizer and some bytes of every tensor


PIECES, PIECE = 1 << 14, 1 << 12  # of all tensors, at least one each; bytes of one
MOST = 16  # pieces of one tensor


def fingerprint(folder: Folder) -> str:
    """Return 16 hex digits that identify a model; takes .1 s to 2 s for any size.

    Hashed: the configuration, the tokenizer, and each tensor's name, type, shape and up to 16 pieces of 4 KiB, evenly
    spaced and including both ends; 64 MiB of a large model. In a GGUF file the whole header replaces configuration and
    tokenizer. An adapter is hashed as the weights are: with it, a model is another one. File names and the distribution
    of tensors over files do not matter. Models that differ only between the pieces have the same fingerprint: it
    distinguishes independent models but does not detect tampering.
    """
    if folder.is_gguf:
        with folder.path.open("rb") as stream:
            digest = hashlib.sha256(stream.read(folder.headers[0].start))
    else:
        digest = hashlib.sha256(json.dumps(folder.config, sort_keys=True).encode())
    digest.update(b"plain")
    for file in filter(Path.is_file, (folder.path / name for name in TOKENIZER_FILES)):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while part := stream.read(1 << 20):
                digest.update(part)
    weights, headers = [*folder.weights], [*folder.headers]
    if folder.adapter is not None:
        adapted = _json(folder.adapter / ADAPTER_CONFIG, SMALL)
        digest.update(json.dumps(adapted, sort_keys=True).encode())
        weights.append(folder.adapter / ADAPTER)
        headers.append(_sound(weights[-1], untrusted.safetensors))
    tensors = sorted(
        (name, i, tensor)
        for i, header in enumerate(headers)
        for name, tensor in header.tensors.items()
    )
    pieces = max(1, min(MOST, PIECES // max(1, len(tensors))))
    streams = [os.open(file, os.O_RDONLY) for file in weights]
    try:
        for name, i, tensor in tensors:
            digest.update(f"{name!r} {tensor.dtype} {tensor.shape}\n".encode())
            for start, size in _pieces(*tensor.span, pieces):
                digest.update(os.pread(streams[i], size, start))
    finally:
        for stream in streams:
            os.close(stream)
    return digest.hexdigest()[:16]


def _pieces(first: int, last: int, count: int) -> list[tuple[int, int]]:
    """Return (start, bytes) of `count` pieces between two offsets, or of the whole range if it is no larger."""
    if last - first <= count * PIECE:
        return [(first, last - first)]
    if count == 1:
        return [((first + last - PIECE) // 2, PIECE)]
    span = last - first - PIECE
    return [(first + span * i // (count - 1), PIECE) for i in range(count)]
