"""`mlxkv doctor --share`: results of a machine as a file for an issue."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

from mlxkv.scrub import clean, public_system, put

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
# Names of products: "Max" may also be the name of a user.
PRODUCTS = ("chip", "device_name", "format")


def document(data: dict) -> dict:
    """The results of `command.run` with the machine's GPU and cores, scrubbed."""
    import mlx.core as mx

    from mlxkv.metal import gpu

    about, golden = dict(data["machine"]), data["golden"]
    about["system"] = public_system(about["system"])
    device = {k: v for k, v in mx.device_info().items() if k in DEVICE}
    cores = {"cpu_cores": os.cpu_count(), "gpu_cores": gpu.known_cores(), "device": device}
    return _scrubbed(
        {
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
