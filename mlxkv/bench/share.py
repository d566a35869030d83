"""The file that a user attaches to an issue: no names, no paths; and its reader."""

from __future__ import annotations

import getpass
import json
import math
import platform
import re
import time
from pathlib import Path

from mlxkv.errors import MachineError, UserError

FORMAT, VERSION = "mlxkv-bench", 1
LARGEST = 1 << 20  # bytes of a file that is read
PATH = re.compile(r"(?<![\w.~])(?:~|\.{1,2})?(?:/[^\s/:'\"(),;]+)+/?")
# Folders may have spaces in their names. In quotes a path ends where they do; below these folders, where
# a line or a column is given, or what is wrong. An apostrophe inside of a word is no quote.
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
# The folder of a user, or a disk: its last name is a name of somebody's.
_OWN = re.compile(r"(?:.*/)?(?:Users|Volumes|home)/[^/]*", re.IGNORECASE)
# What a row has to hold: name -> may it be missing (None).
ROW_NUMBERS = {
    *("prefill_seconds", "tokens_per_second", "peak_bytes", "kv_bytes", "baseline_ratio"),
    *("prefill_tokens_per_second", "first_token_seconds", "of_copy", "spread"),
}


def write(data: dict, name: str) -> Path:
    """Write `data` (of `whole.document`), scrubbed, to the file `name`, or for "" to a new one in
    the current folder. Returns the file."""
    return put(scrubbed(data), name)


def put(shared: dict, name: str, kind: str = "bench") -> Path:
    """Write what holds no names to the file `name`, or for "" to a new one of this kind in the current
    folder. Returns the file."""
    file = Path(name).expanduser() if name else default_file(shared, Path(), kind)
    try:
        file.write_text(json.dumps(shared, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise MachineError(f"[--share] cannot write {file}: {error.strerror}") from None
    return file


def default_file(data: dict, folder: Path, kind: str = "bench") -> Path:
    """mlxkv-<kind>-<chip>-<date>.json, with a number if there is one already."""
    chip = re.sub(r"[^a-z0-9]+", "-", data["machine"]["chip"].lower()).strip("-") or "unknown"
    stem = f"mlxkv-{kind}-{chip}-{data.get('date') or time.strftime('%Y-%m-%d')}"
    file, count = folder / f"{stem}.json", 1
    while file.exists():
        count += 1
        file = folder / f"{stem}-{count}.json"
    return file


def scrubbed(data: dict) -> dict:
    """A copy without host name, user name and paths.

    A local folder is reduced to its last name, the system to its name and version number.
    """
    data = json.loads(json.dumps(data))
    data["model"]["name"] = public_name(data["model"]["name"])
    system = data["machine"]["system"].split()
    if len(system) == 3:  # name, release, architecture: builds of one's own are named by people
        system[1] = re.match(r"[\d.]*", system[1])[0]
        data["machine"]["system"] = " ".join(part for part in system if part)
    for row in data["rows"]:
        row["error"] = row["error"] and clean(row["error"])
    for gate in data["gates"]:
        gate["reason"] = gate["reason"] and clean(gate["reason"])
    return data


def public_name(model: str) -> str:
    """An alias or hub name as it is; of a folder its last name."""
    path = Path(model).expanduser()
    if path.is_dir() or path.is_absolute() or model.startswith((".", "~")):
        return path.resolve().name or "model"
    return model


def clean(text: str) -> str:
    """A text of somebody else's without paths, user name and host name."""
    if len(home := str(Path.home())) > 1:  # and no longer name that begins like it
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


def read(file: Path) -> dict:
    """A shared file, checked. Raises UserError with what is wrong with it."""

    def bad(what: str) -> UserError:
        return UserError(f"[render] {file.name}: {what}")

    try:
        size = file.stat().st_size
        text = file.read_bytes() if size <= LARGEST else b""
    except OSError as error:
        raise bad(f"cannot be read ({error.strerror})") from None
    if size > LARGEST:
        raise bad(f"larger than {LARGEST} bytes")
    try:
        data = json.loads(text.decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise bad("not JSON") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise bad(f"not a file of mlxkv bench --share (no format {FORMAT!r})")
    if data.get("version") != VERSION or isinstance(data.get("version"), bool):
        raise bad(f"version {data.get('version')!r} of the format; this mlxkv reads {VERSION}")
    try:
        wrong = _wrong(data)
    except (KeyError, TypeError, AttributeError) as error:
        wrong = f"parts missing or of the wrong type ({error})"
    if wrong:
        raise bad(wrong)
    return data


def _no_number(text: str):
    raise ValueError(text)


def _wrong(data: dict) -> str | None:
    """What is wrong with the contents, or None; anything missing raises."""
    machine, model = data["machine"], data["model"]
    texts = {
        "date": data["date"],
        "chip": machine["chip"],
        "backend": machine["backend"],
        "power source": machine["power"]["source"],
        "power mode": machine["power"]["mode"],
        "model": model["name"],
        "weights": model["weights"],
        "dtype": model["dtype"],
        **{name: data["versions"][name] for name in ("mlxkv", "mlx", "mlx-lm")},
    }
    if found := [name for name, text in texts.items() if not isinstance(text, str)]:
        return f"{found[0]} is not a text"
    if not _is_number(machine["memory_bytes"]):
        return "memory_bytes is not a number"
    if not isinstance(data["rows"], list):
        return "rows is not a list"
    for index, row in enumerate(data["rows"]):
        if not isinstance(row["preset"], str) or not _is_number(row["context"]):
            return f"row {index} has no preset and context"
        if not isinstance(row["error"], str | None) or not _is_number(row["runs"]):
            return f"row {index} has no error and runs"
        for name in sorted(ROW_NUMBERS):
            missing = row[name] is None and (
                not row["runs"] or name in ("baseline_ratio", "of_copy")
            )
            if not missing and not _is_number(row[name]):
                return f"row {index}: {name} is not a number"
    return None


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value >= 0
    )
