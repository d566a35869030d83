"""`mlxkv doctor --share`: results of a machine as a file for an issue."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

from mlxkv.console import user_path
from mlxkv.errors import MachineError

# A path may extend to the end of the line, or to a line number.
PATH = re.compile(r"(?:(?<![\w.~])|(?<=-[A-Z]))[~.]*/+\S.*?(?=:\d|$)", re.MULTILINE)


def check_place(name: str) -> None:
    """Raise MachineError, before minutes of work, if `write_share` could not write the file `name`."""
    file = user_path(name, "--share")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise MachineError(f"[--share] cannot write {file}; choose a file in a folder of yours")


def public_system(system: str) -> str:
    """'Linux 6.1.0-mine x86_64' -> 'Linux 6.1.0 x86_64': people name their own builds."""
    parts = system.split()
    if len(parts) == 3:
        parts[1] = re.sub(r"[^\d.].*", "", parts[1])
    return " ".join(filter(None, parts))


def clean(text: str) -> str:
    """Remove paths, user name and host name from a text."""
    text = PATH.sub("PATH", text)
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):
        user = ""
    hosts = platform.node(), platform.node().split(".")[0]
    for name, instead in ((user, "USER"), *((host, "HOST") for host in hosts)):
        if name and name != "localhost":
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", instead, text, flags=re.I)
    return text


FORMAT, VERSION = "mlxkv-doctor", 1
# MLX's facts of a GPU, except those that identify a single device.
DEVICE = (
    *("architecture", "device_name", "compute_capability_major", "compute_capability_minor"),
    *("memory_size", "total_memory", "max_buffer_length", "max_recommended_working_set_size"),
)
# Product names, not scrubbed: "Max" may also be the name of a user.
PRODUCTS = ("chip", "device_name", "format")


def document(data: dict) -> dict[str, Any]:
    """Return the results of `command.run_doctor` with the machine's GPU and cores, scrubbed."""
    import mlx.core as mx

    from mlxkv.metal import gpu

    about, golden = dict(data["machine"]), data["golden"]
    about["system"] = public_system(about["system"])
    device = {k: v for k, v in mx.device_info().items() if k in DEVICE}
    cores = {"cpu_cores": os.cpu_count(), "gpu_cores": gpu.known_cores(), "device": device}
    shared = {
        "format": FORMAT,
        "version": VERSION,
        "date": time.strftime("%Y-%m-%d"),
        "machine": about | cores | {"macos": platform.mac_ver()[0] or None},
        "backend": next(row["name"] for row in data["backends"] if row["used"]),
        "versions": data["versions"],
        "out_of_range": data["out_of_range"],
        "kernels": data["kernels"],
        "kernels_left": data["kernels_left"],
        "golden": {
            "cases": len(golden),
            "right": sum(row["ok"] for row in golden),
            "wrong": [row for row in golden if not row["ok"]],
        },
    }
    return {key: x if key in PRODUCTS else _scrubbed(x) for key, x in shared.items()}


def _scrubbed(value):
    """Clean every text in `value` of names and paths."""
    if isinstance(value, dict):
        return {key: x if key in PRODUCTS else _scrubbed(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_scrubbed(x) for x in value]
    return clean(value) if isinstance(value, str) else value


def write_share(data: dict, name: str) -> Path:
    """Write the results of `command.run_doctor` to the file `name`, or for "" to a new one here,
    mlxkv-doctor-<chip>-<date>.json. Returns the file. Raises MachineError."""
    shared = document(data)
    file = user_path(name, "--share") if name else _new_file(shared)
    try:
        file.write_text(json.dumps(shared, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise MachineError(f"[--share] cannot write {file}: {error.strerror}") from None
    return file


def _new_file(shared: dict) -> Path:
    """Return an unused name, numbered if the file exists."""
    chip = re.sub(r"[^a-z0-9]+", "-", shared["machine"]["chip"].lower()).strip("-") or "unknown"
    stem, count = f"mlxkv-doctor-{chip}-{shared['date']}", 1
    while (file := Path(f"{stem}-{count}.json" if count > 1 else f"{stem}.json")).exists():
        count += 1
    return file
