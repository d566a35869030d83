"""Files that a user attaches to an issue: written without names and paths, read back, shown in Markdown."""

from __future__ import annotations

import getpass
import json
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path

from mlxkv import untrusted
from mlxkv.console import note, user_path
from mlxkv.errors import MachineError, UserError
from mlxkv.untrusted import Unsound

LARGEST = 1 << 20  # bytes of a file that is read
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


def read_json(
    file: Path, where: str, form: str, version: int, wrong: Callable[[dict], str | None]
) -> dict:
    """Read and check a shared file of the format `form`, 'mlxkv-bench'.

    wrong: says what is wrong with the contents, or None; an error it raises says that parts are missing.
    Raises UserError, `[where] name: what`.
    """

    def bad(what: str) -> UserError:
        return UserError(f"[{where}] {file.name}: {what}")

    try:
        data = untrusted.read_json(file, LARGEST)
    except FileNotFoundError as error:
        raise bad(f"cannot be read ({error.strerror})") from None
    except Unsound as error:
        raise bad(str(error)) from None
    if not isinstance(data, dict) or data.get("format") != form:
        raise bad(f"not a file of {form.replace('-', ' ')} --share (no format {form!r})")
    found = data.get("version")
    if found != version or isinstance(found, bool):
        raise bad(f"version {found!r} of the format; this mlxkv reads {version}")
    try:
        what = wrong(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"parts missing or of the wrong type ({error})"
    if what:
        raise bad(what)
    return data


def read_folder(folder: str, where: str, read: Callable[[Path], dict]) -> tuple[list[dict], int]:
    """Read every .json file of `folder`: (contents, number of bad files). Each bad file is one line on
    stderr. Raises UserError if there is no such folder."""
    path, found, bad = user_path(folder, where), [], 0
    if not path.is_dir():
        raise UserError(f"[{where}] no such folder; got {folder}; choose one with shared files")
    for file in sorted(path.glob("*.json")):
        try:
            found.append(read(file))
        except UserError as error:
            note(" ".join(str(error).split()))
            bad += 1
    return found, bad


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


def table_line(cells) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(plain_cell(str(cell)) for cell in cells) + " |"


def plain_cell(text: str) -> str:
    """Escape a text so that it stays one cell and is not read as markup."""
    text = " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("`", "'")
    return text.replace("<", "&lt;").replace(">", "&gt;").replace("*", "\\*")
