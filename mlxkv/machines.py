"""`mlxkv doctor --share`: what a machine's kernels do, as a file for an issue, and the page of such files.

python -m mlxkv.machines > docs/results/machines.md
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from pathlib import Path

from mlxkv import console
from mlxkv.bench.share import LARGEST, clean, put
from mlxkv.errors import UserError

FORMAT, VERSION = "mlxkv-doctor", 1
FOLDER = "docs/results/machines"
# What MLX tells of a GPU, without what tells one from another of its kind.
DEVICE = (
    *("architecture", "device_name", "memory_size", "total_memory", "max_buffer_length"),
    *("max_recommended_working_set_size", "compute_capability_major", "compute_capability_minor"),
)
PRODUCTS = ("chip", "device_name", "format")  # "Max" may be a user, too
TITLE = "# Machines that mlxkv has been tried on"
ABOUT = """Written from the files in [machines/](machines), which users sent, by `python -m mlxkv.machines`. A file
holds no host name, user name or path. To send yours, attach what this writes to an issue (`--all` takes
minutes, and tells more):

    mlxkv doctor --all --share"""
NOBODY = "No Mac has reported yet, and no other machine."
HEADS = (
    "machine",
    "system",
    "mlxkv, MLX",
    "golden table",
    "kernels right",
    "not right",
    "int4, D 128",
)


def document(data: dict) -> dict:
    """What `doctor.run` has found, with what is known of the machine, scrubbed."""
    import mlx.core as mx

    from mlxkv import gpu

    about, golden = dict(data["machine"]), data["golden"]
    system = about["system"].split()
    if len(system) == 3:  # name, release, architecture: builds of one's own are named by people
        system[1] = re.match(r"[\d.]*", system[1])[0]
        about["system"] = " ".join(part for part in system if part)
    device = {k: v for k, v in mx.device_info().items() if k in DEVICE}
    more = {"cpu_cores": os.cpu_count(), "gpu_cores": gpu.known_cores(), "device": device}
    return _scrubbed(
        {
            **{"format": FORMAT, "version": VERSION, "date": time.strftime("%Y-%m-%d")},
            "machine": about | more | {"macos": platform.mac_ver()[0] or None},
            "backend": next(row["name"] for row in data["backends"] if row["used"]),
            **{
                name: data[name] for name in ("versions", "out_of_range", "kernels", "kernels_left")
            },
            "golden": {
                "cases": len(golden),
                "right": sum(row["ok"] for row in golden),
                "wrong": [row for row in golden if not row["ok"]],
            },
        }
    )


def _scrubbed(value):
    """Every text in it without names and paths."""
    if isinstance(value, dict):
        return {key: x if key in PRODUCTS else _scrubbed(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_scrubbed(x) for x in value]
    return clean(value) if isinstance(value, str) else value


def write(data: dict, name: str) -> Path:
    """Write what `doctor.run` has found to the file `name`, or for "" to a new one here. Returns the file."""
    return put(document(data), name, "doctor")


def read(file: Path) -> dict:
    """A shared file, checked. Raises UserError with what is wrong with it."""

    def bad(what: str) -> UserError:
        return UserError(f"[machines] {file.name}: {what}")

    try:
        with file.open("rb") as opened:
            text = opened.read(LARGEST + 1)
    except OSError as error:
        raise bad(f"cannot be read ({error.strerror})") from None
    if len(text) > LARGEST:
        raise bad(f"larger than {LARGEST} bytes")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise bad("not JSON") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise bad(f"not a file of mlxkv doctor --share (no format {FORMAT!r})")
    if data.get("version") is not VERSION:
        raise bad(f"version {data.get('version')!r} of the format; this mlxkv reads {VERSION}")
    try:
        _cells(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise bad(f"parts missing or of the wrong type ({error})") from None
    return data


def page(found: list[dict]) -> str:
    """The page of all machines, Macs first, and what did not go well on each."""
    from mlxkv.bench.render import _line

    if not found:
        return f"{TITLE}\n\n{NOBODY}\n\n{ABOUT}\n"
    found = sorted(found, key=lambda d: (not d["machine"]["macos"], _machine(d), d["date"]))
    table = [_line(HEADS), "|" + "---|" * len(HEADS), *(_line(_cells(data)) for data in found)]
    parts = [TITLE, ABOUT, "\n".join(table)]
    if not any(data["machine"]["macos"] for data in found):
        parts.insert(1, "No Mac has reported yet.")
    for data in found:
        if failed := [row for row in data["kernels"] if _failed(row)]:
            cells = [(_kernel(row), row["state"], row["reason"]) for row in failed]
            heads = [_line(("kernel", "state", "reason")), "|---|---|---|"]
            title = f"## {_machine(data)}, {data['date']}: what did not run"
            parts.append("\n".join([title, "", *heads, *map(_line, cells)]))
    return "\n\n".join(parts) + "\n"


def _failed(row: dict) -> bool:
    return bool(row["should_run"]) and row["state"] not in ("right", "not tried")


def _kernel(row: dict) -> str:
    return f"{row['preset']} at head dim {row['head_dim']}, {row['body']}"


def _machine(data: dict) -> str:
    about = data["machine"]
    cores = f", {about['gpu_cores']} GPU cores" if about["gpu_cores"] else ""
    device = "" if about["macos"] else f", {data['backend']} {about['device']['device_name']}"
    return f"{about['chip']}{cores}, {console.human_bytes(about['memory_bytes'])}{device}"


def _cells(data: dict) -> list[str]:
    about, golden, rows = data["machine"], data["golden"], data["kernels"]
    tried = [row for row in rows if row["should_run"] and row["state"] != "not tried"]
    right, failed = sum(row["state"] == "right" for row in tried), list(filter(_failed, tried))
    best = [row for row in rows if (row["preset"], row["head_dim"]) == ("int4", 128)]
    timed = [row for row in best if row["attend_us"]]
    return [
        _machine(data),
        f"macOS {about['macos']}" if about["macos"] else about["system"],
        ", ".join(data["versions"][name] or "missing" for name in ("mlxkv", "mlx")),
        f"{golden['right']} of {golden['cases']}",
        f"{right} of {len(tried)}" if tried else "none run",
        ", ".join(_kernel(row) for row in failed),
        "; ".join(
            f"{r['body']} {r['attend_us']:.0f} us, {r['speedup']:.1f}x plain ops" for r in timed
        ),
    ]


def main(folder: str = FOLDER) -> int:
    """The page to stdout; a line on stderr and exit code 2 for files that are bad."""
    path, found, bad = Path(folder).expanduser(), [], 0
    if not path.is_dir():
        raise UserError(f"[machines] no such folder; got {folder}; choose one with shared files")
    for file in sorted(path.glob("*.json")):
        try:
            found.append(read(file))
        except UserError as error:
            console.note(" ".join(str(error).split()))
            bad += 1
    print(page(found), end="")
    return 2 if bad else 0


if __name__ == "__main__":
    console.run_tool(lambda: main(*sys.argv[1:2]))
