"""Files that a user attaches to an issue, written without names and paths."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import time
from pathlib import Path

from mlxkv.console import user_path
from mlxkv.errors import MachineError

PATH = re.compile(r"(?<![\w.~])(?:~|\.{1,2})?(?:/[^\s/:'\"(),;]+)+/?")
# Folder names may contain spaces. A path in quotes ends at the closing quote (an apostrophe inside a word
# is none); a path below the folders of PRIVATE ends before a line number or a message.
_QUOTES = (("'", "'"), ('"', '"'), ("`", "`"), ("\u2018", "\u2019"), ("\u201c", "\u201d"))
_INSIDE = r"(?:[^{0}{1}\n]|{1}(?=\w))*"
QUOTED = re.compile(
    "|".join(
        rf"(?<={first})(?:~|\.{{1,2}})?/{_INSIDE.format(first, last)}(?={last}(?!\w))"
        for first, last in _QUOTES
    )
)
_END = r":(?=[\d\s]|\Z)|['\"`\u2019\u201d](?!\w)"
PRIVATE = re.compile(
    rf"(?<![^\s:'\"(=,])(?:~|[^\s:'\"(=,]*/(?:Users|Volumes|private|home))/(?:(?!{_END}).)*",
    re.IGNORECASE,
)
# The home folder of a user, or a disk: its last name may name a person.
_OWN = re.compile(r"(?:.*/)?(?:Users|Volumes|home)/[^/]*", re.IGNORECASE)


def put(shared: dict, name: str, kind: str) -> Path:
    """Write `shared`, already scrubbed, to the file `name`, or for "" to `default_file` in the current
    folder. Returns the file. Raises MachineError if it cannot be written."""
    file = user_path(name, "--share") if name else default_file(shared, Path(), kind)
    try:
        file.write_text(json.dumps(shared, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise MachineError(f"[--share] cannot write {file}: {error.strerror}") from None
    return file


def check_place(name: str) -> None:
    """Raise MachineError, before minutes of work, if `put` could not write the file `name`."""
    file = user_path(name, "--share")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise MachineError(f"[--share] cannot write {file}; choose a file in a folder of yours")


def default_file(data: dict, folder: Path, kind: str) -> Path:
    """mlxkv-<kind>-<chip>-<date>.json, with a number if that file exists."""
    chip = re.sub(r"[^a-z0-9]+", "-", data["machine"]["chip"].lower()).strip("-") or "unknown"
    stem = f"mlxkv-{kind}-{chip}-{data.get('date') or time.strftime('%Y-%m-%d')}"
    file, count = folder / f"{stem}.json", 1
    while file.exists():
        count += 1
        file = folder / f"{stem}-{count}.json"
    return file


def public_name(model: str) -> str:
    """Return an alias or hub name unchanged, of a folder or file its last name."""
    path = user_path(model, "--model")
    if path.exists() or path.is_absolute() or model.startswith((".", "~")):
        return path.resolve().name or "model"
    return model


def public_system(system: str) -> str:
    """'Linux 6.1.0-mine x86_64' -> 'Linux 6.1.0 x86_64': people name their own builds."""
    parts = system.split()
    if len(parts) == 3:
        parts[1] = re.match(r"[\d.]*", parts[1])[0]
    return " ".join(filter(None, parts))


def clean(text: str) -> str:
    """Remove paths, user name and host name from a text; of a path its last name stays."""
    if len(home := str(Path.home())) > 1:  # not a longer name with this beginning
        text = re.sub(rf"{re.escape(home)}(?=[/'\":,;)\n]|\Z)", "~", text, flags=re.I)
    for paths in (QUOTED, PRIVATE, PATH):
        text = paths.sub(_last_name, text)
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):
        user = ""
    hosts = {platform.node(), platform.node().split(".")[0]}
    for name, instead in [
        (user, "USER"),
        *((host, "HOST") for host in sorted(hosts, key=len)[::-1]),
    ]:
        if name and name != "localhost":
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", instead, text, flags=re.I)
    return text


def _last_name(match: re.Match) -> str:
    path = match[0].rstrip("/ ")
    if not path:
        return match[0]
    return "PATH" if _OWN.fullmatch(path) else path.rsplit("/", 1)[-1]
