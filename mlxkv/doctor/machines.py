"""`mlxkv doctor --share`: results of a machine as a file for an issue, and the page of such files.

python -m mlxkv.doctor.machines FOLDER
"""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

from mlxkv import console
from mlxkv.doctor import states
from mlxkv.scrub import clean, public_system, put, read_folder, read_json, table_line

FORMAT, VERSION = "mlxkv-doctor", 1
# What MLX says of a GPU, without what identifies a single one.
DEVICE = (
    "architecture",
    "device_name",
    "memory_size",
    "total_memory",
    "max_buffer_length",
    "max_recommended_working_set_size",
    "compute_capability_major",
    "compute_capability_minor",
)
PRODUCTS = (
    "chip",
    "device_name",
    "format",
)  # names of products: "Max" may also be the name of a user
TITLE = "# Machines that mlxkv has been tried on\n\nReports of `mlxkv doctor` from users' machines, and how to add one."
ABOUT = """Written from files that users sent, by `python -m mlxkv.doctor.machines`.
A file holds no host name, user name or path. To send yours, attach what this writes to an issue (`--all` takes
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
    """The results of `command.run` with the machine's GPU and cores, scrubbed."""
    import mlx.core as mx

    from mlxkv.metal import gpu

    about, golden = dict(data["machine"]), data["golden"]
    about["system"] = public_system(about["system"])
    device = {k: v for k, v in mx.device_info().items() if k in DEVICE}
    more = {"cpu_cores": os.cpu_count(), "gpu_cores": gpu.known_cores(), "device": device}
    return _scrubbed(
        {
            "format": FORMAT,
            "version": VERSION,
            "date": time.strftime("%Y-%m-%d"),
            "machine": about | more | {"macos": platform.mac_ver()[0] or None},
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
    )


def _scrubbed(value):
    """Clean every text in `value` of names and paths."""
    if isinstance(value, dict):
        return {key: x if key in PRODUCTS else _scrubbed(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_scrubbed(x) for x in value]
    return clean(value) if isinstance(value, str) else value


def write(data: dict, name: str) -> Path:
    """Write the results of `command.run` to the file `name`, or for "" to a new file here. Returns the file."""
    return put(document(data), name, "doctor")


def read(file: Path) -> dict:
    """Read and check a shared file. Raises UserError."""
    return read_json(file, "machines", FORMAT, VERSION, _wrong)


def _wrong(data: dict) -> None:
    """Raise KeyError, TypeError, ValueError or AttributeError if parts that the page shows are missing."""
    _cells(data)


def page(found: list[dict]) -> str:
    """The page of all machines, Macs first, with the kernels that failed on each."""
    if not found:
        return f"{TITLE}\n\n{NOBODY}\n\n{ABOUT}\n"
    found = sorted(found, key=lambda d: (not d["machine"]["macos"], _machine(d), d["date"]))
    table = [
        table_line(HEADS),
        "|" + "---|" * len(HEADS),
        *(table_line(_cells(data)) for data in found),
    ]
    parts = [TITLE, ABOUT, "\n".join(table)]
    if not any(data["machine"]["macos"] for data in found):
        parts.insert(1, "No Mac has reported yet.")
    for data in found:
        if failed := states.failed(data["kernels"]):
            cells = [(states.name(row), row["state"], row["reason"]) for row in failed]
            heads = [table_line(("kernel", "state", "reason")), "|---|---|---|"]
            title = f"## {_machine(data)}, {data['date']}: what did not run"
            parts.append("\n".join([title, "", *heads, *map(table_line, cells)]))
    return "\n\n".join(parts) + "\n"


def _machine(data: dict) -> str:
    about = data["machine"]
    cores = f", {about['gpu_cores']} GPU cores" if about["gpu_cores"] else ""
    device = "" if about["macos"] else f", {data['backend']} {about['device']['device_name']}"
    return f"{about['chip']}{cores}, {console.human_bytes(about['memory_bytes'])}{device}"


def _cells(data: dict) -> list[str]:
    about, golden, rows = data["machine"], data["golden"], data["kernels"]
    tried = states.tried(rows)
    best = [row for row in rows if (row["preset"], row["head_dim"]) == ("int4", 128)]
    timed = [row for row in best if row["attend_us"]]
    return [
        _machine(data),
        f"macOS {about['macos']}" if about["macos"] else about["system"],
        ", ".join(data["versions"][name] or "missing" for name in ("mlxkv", "mlx")),
        f"{golden['right']} of {golden['cases']}",
        f"{states.right(tried)} of {len(tried)}" if tried else "none run",
        ", ".join(map(states.name, states.failed(rows))),
        "; ".join(
            f"{r['body']} {r['attend_us']:.0f} us, {r['speedup']:.1f}x plain ops" for r in timed
        ),
    ]


def main(folder: str = "machines") -> int:
    """Print the page; exit code 2 if a file is bad."""
    found, bad = read_folder(folder, "machines", read)
    print(page(found), end="")
    return 2 if bad else 0


if __name__ == "__main__":
    console.run_tool(lambda: main(*sys.argv[1:2]))
