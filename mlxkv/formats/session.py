"""The file of a session: mlx-lm's prompt cache (safetensors) with entries that say which model and which cache
wrote it, and a SHA-256 of every byte, computed with the checksum's own 64 characters set to zero. A pack is a session
whose system prompt is the text of files, and which names them.

No framework is imported here: both tracks write and read these files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from mlxkv import __version__, untrusted
from mlxkv.console import user_path
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig
from mlxkv.untrusted import Tensor, Unsound

FORMAT = "1"
KEY = "mlxkv_checksum"
ENDING, PACK = ".safetensors", ".kvpack"
ENDINGS = ENDING, PACK
LONGEST_NAME = 200  # bytes; file systems take 255, with the ending and the number of a draft
LIST = "CacheList"  # of mlx-lm: several caches of one layer
NO_CHECKSUM = "0" * 64
LONGEST = 64 << 20  # bytes of a header: room for the tokens and the text of a million
MOST = 512  # tensors of a layer
TYPES = {"F32", "F16", "BF16", "BOOL"}
TYPES |= {f"{sign}{bits}" for sign in "IU" for bits in (8, 16, 32, 64)}
ENTRIES = ("fingerprint", "kv", "kv_name", "messages", "mlx_lm_version", "model", "raw", "text")
ENTRIES += ("tokens", KEY)


@dataclass
class Saved:
    """A session. text: what the cached tokens say, as the chat template wrote it. files: of a pack, what it was read
    from. asked: the model as it was asked for, for a pack."""

    cache: Any
    tokens: list[int]
    messages: list[dict] = field(default_factory=list)
    text: str = ""
    raw: bool = False
    files: list[PackedFile] = field(default_factory=list)
    asked: str = ""


@dataclass(frozen=True)
class PackedFile:
    """A file of a pack: its name without folders, the SHA-256 of its bytes, and how many they were."""

    name: str
    sha256: str
    size: int


def path_for(name: str, option: str, ending: str = ENDING) -> Path:
    """Return the file for a name the user typed, with the ending. Raises UserError, `option` in brackets, for a name
    that no file can have."""
    path = user_path(name, option)
    if path.name in ("", ".."):
        raise UserError(f"[{option}] not a name for a file; got {name!r}; write one, like notes")
    if len(os.fsencode(path.name)) > LONGEST_NAME:
        raise UserError(f"[{option}] the name is too long for a file; got {name[:60]!r}...")
    return path if path.suffix == ending else path.with_name(path.name + ending)


def file_named(name: str) -> Path:
    """Return the file of `--load NAME`: as named, or with the ending. Raises UserError."""
    if not name.strip():
        raise UserError("[load] no file name; got an empty one")
    path = user_path(name, "load")
    return path if path.is_file() or path.suffix in ENDINGS else path_for(name, "load")


def entries(
    saved: Saved, model: str, fingerprint: str, kv_name: str, kv: CacheConfig, mlx_lm: str
) -> dict[str, str]:
    """Return the metadata of a session. mlx_lm: the version whose format of prompt caches this is."""
    pack = {"files": json.dumps([asdict(x) for x in saved.files]), "asked": saved.asked}
    return (pack if saved.files else {}) | {
        "mlxkv_format": FORMAT,
        KEY: NO_CHECKSUM,
        "mlxkv_version": __version__,
        "mlx_lm_version": mlx_lm,
        "model": model,
        "fingerprint": fingerprint,
        "kv_name": kv_name,
        "kv": json.dumps(kv.as_dict()),
        "raw": json.dumps(saved.raw),
        "text": saved.text,
        "tokens": json.dumps(saved.tokens),
        "messages": json.dumps(saved.messages, ensure_ascii=False),
    }


@dataclass(frozen=True)
class SessionHeader:
    """Header of a session file, read before any tensor. entries: named as by `entries`. kinds: classes of its caches,
    in order."""

    path: Path
    entries: dict[str, str]
    kinds: list[str]

    def wrong(self, problem: str) -> UserError:
        return wrong(self.path, problem)


def wrong(path: Path, problem: str) -> UserError:
    return UserError(f"[load] {str(path)!r} {problem}")


def read_header(path: Path, follow: bool = True) -> SessionHeader:
    """Read and check the header of a session. follow: whether the path may be a link. Raises UserError."""
    try:
        head = untrusted.safetensors(path, follow, LONGEST)
        pattern = re.compile(r"(\d)\.(.+)", re.DOTALL)
        parts: dict[str, dict[str, str]] = {}  # in the order of mlx-lm's version that wrote it
        for name, text in head.metadata.items():
            if match := pattern.fullmatch(name):
                parts.setdefault(match[1], {})[match[2]] = text
        at = next((n for n, part in parts.items() if "mlxkv_format" in part), None)
        if at is None:
            raise wrong(path, "is not a session saved by mlxkv chat")
        entries_read, classes, flags = (parts.get(str(int(at) + n), {}) for n in range(3))
        kinds = [classes[str(i)] for i in range(len(classes))]
        _check_tensors(head.tensors, kinds, flags)
    except FileNotFoundError:
        raise UserError(f"[load] no such file; got {str(path)!r}") from None
    except Unsound as error:
        raise wrong(path, str(error)) from None
    except KeyError as error:
        raise wrong(path, f"has parts missing ({printable(str(error))})") from None
    if absent := [name for name in ENTRIES if name not in entries_read]:
        raise wrong(path, f"has parts missing ({', '.join(absent)})")
    return SessionHeader(path, entries_read, kinds)


def _check_tensors(tensors: dict[str, Tensor], kinds: list[str], flags: dict[str, str]) -> None:
    """Raise Unsound or KeyError for tensors of other layers than those of `kinds`, for too many, and for
    numbers and names, which `flags` lists, that are none."""
    count = len(kinds)
    layers = {name.partition(".")[0] for name in tensors}
    if not layers <= {str(i) for i in range(count)} or len(tensors) > MOST * count:
        raise Unsound("has other tensors than its caches")
    for tensor in tensors.values():
        if tensor.dtype not in TYPES or max(tensor.shape, default=0) >= 1 << 31:
            raise Unsound("has tensors of types or sizes that no cache has")
    for key, name in flags.items():
        if key.endswith(".0"):
            size, flag = prod(tensors[name].shape), flags[f"{key[:-1]}1"]
            inside = kinds[int(name.partition(".")[0])] == LIST  # which names the caches inside
            names = {"string": range(100)} if inside else {}
            if size not in ({"scalar": (1,), "none": (0,)} | names).get(flag, ()):
                raise Unsound("has a number or a name that is none")


def printable(text: str) -> str:
    """Return a text from a file for an error: short, without control characters."""
    return "".join(c if c.isprintable() else "?" for c in text[:80])


def check_session(
    head: SessionHeader,
    loaded_name: str,
    fingerprint: str,
    kv_name: str,
    kv: CacheConfig,
    mlx_lm: str,
) -> None:
    """Raise UserError unless the file is a whole session of the model with this fingerprint, saved with
    this cache, in the format of this version of mlx-lm."""
    data = head.entries
    check_version(head)
    if checksum(head.path) != data[KEY]:
        raise head.wrong("was changed after it was saved: the checksum differs")
    if data["fingerprint"] != fingerprint:
        raise head.wrong(
            f"belongs to another model; got {printable(data['model'])}; this is {loaded_name}"
        )
    check_cache(head, kv_name, kv)
    if (wrote := data["mlx_lm_version"]).split(".")[:2] != mlx_lm.split(".")[:2]:
        raise head.wrong(
            f"was saved with mlx-lm {printable(wrote)}; its cache format differs from that of mlx-lm {mlx_lm}"
        )


def check_version(head: SessionHeader) -> None:
    """Raise UserError unless this version reads such files."""
    if (version := head.entries["mlxkv_format"]) != FORMAT:
        raise head.wrong(f"has session format {printable(version)}; this version reads {FORMAT}")


def cache_of(head: SessionHeader) -> CacheConfig:
    """Return the configuration that the file was saved with. Raises UserError."""
    try:
        return CacheConfig.from_dict(untrusted.parse(head.entries["kv"]))
    except (Unsound, UserError):
        raise head.wrong("names a cache that this version does not know") from None


def check_cache(head: SessionHeader, kv_name: str, kv: CacheConfig) -> None:
    """Raise UserError unless the file was saved with this cache."""
    if cache_of(head) != kv:
        raise head.wrong(
            f"was saved with another cache; got --kv {printable(head.entries['kv_name'])}; "
            f"this session runs --kv {kv_name}"
        )


def tokens_of(head: SessionHeader, vocabulary: int = 1 << 31) -> list[int]:
    """Its tokens. Raises UserError unless they are numbers below `vocabulary`."""
    try:
        tokens = untrusted.parse(head.entries["tokens"], 1)
    except Unsound as error:
        raise head.wrong(f"has a list of tokens that {error}") from None
    if type(tokens) is not list or not all(type(t) is int and 0 <= t < vocabulary for t in tokens):
        raise head.wrong("has tokens that are none of this model's")
    return tokens


def saved_of(head: SessionHeader, cache, vocabulary: int | None) -> Saved:
    """Return the session of a header. Raises UserError for entries of the wrong types."""
    try:
        messages, raw = (untrusted.parse(head.entries[name], 2) for name in ("messages", "raw"))
    except Unsound as error:
        raise head.wrong(f"has a conversation that {error}") from None
    sound = type(messages) is list and all(_is_message(message) for message in messages)
    if not sound or type(raw) is not bool:
        raise head.wrong("has messages that are no conversation")
    tokens, text = tokens_of(head, vocabulary or 1 << 31), head.entries["text"]
    return Saved(cache, tokens, messages, text, raw, files_of(head), head.entries.get("asked", ""))


def files_of(head: SessionHeader) -> list[PackedFile]:
    """Return the files of a pack, none of another session. Raises UserError."""
    try:
        found = [PackedFile(**x) for x in untrusted.parse(head.entries.get("files", "[]"), 2)]
    except (Unsound, TypeError):
        raise head.wrong("has a list of files that is none") from None
    for file in found:
        sound = isinstance(file.name, str) and isinstance(file.sha256, str)
        if not sound or type(file.size) is not int:
            raise head.wrong("has a list of files that is none")
    return found


def _is_message(message) -> bool:
    match message:
        case {"role": "assistant", "content": str(), "reasoning_content": str()}:
            return len(message) == 3
        case {"role": "system" | "user" | "assistant", "content": str()}:
            return len(message) == 2
    return False


def checksum(path: Path) -> str:
    """SHA-256 of the file as it was before its own checksum was filled in. Raises UserError."""
    try:
        with untrusted.opened(path) as file:
            return _checksum(file)[0]
    except FileNotFoundError:
        raise wrong(path, "is gone") from None
    except Unsound as error:
        raise wrong(path, str(error)) from None
    except ValueError:
        raise wrong(path, "has no checksum where it belongs") from None


def _checksum(file: BinaryIO) -> tuple[str, int]:
    """Return the checksum and its offset in the file."""
    digest = hashlib.sha256()
    start = file.read(8)
    head = file.read(int.from_bytes(start, "little"))
    at = checksum_at(head)
    digest.update(start + head[:at] + NO_CHECKSUM.encode() + head[at + 64 :])
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest(), 8 + at


def checksum_at(head: bytes) -> int:
    """Return the offset of the 64 characters of the checksum: `"0.mlxkv_checksum":"..."`."""
    key = head.index(f'.{KEY}"'.encode()) + len(KEY) + 2
    return head.index(b'"', key) + 1


def fill_checksum(file: BinaryIO) -> None:
    """Write the checksum of a session into its place. Raises OSError where the file ends too early."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    try:
        head = json.loads(file.read(min(length, size)))
        ends = [entry["data_offsets"][1] for key, entry in head.items() if key != "__metadata__"]
        complete = size == 8 + length + max(ends, default=0)
    except ValueError:
        complete = False
    if not complete:
        raise OSError(errno.ENOSPC, "the file was cut short, is the disk full?")
    file.seek(0)
    digest, at = _checksum(file)
    file.seek(at)
    file.write(digest.encode())
