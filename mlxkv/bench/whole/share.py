"""Write and read the file of results that a user attaches to an issue. It holds no names and paths."""

from __future__ import annotations

import json
import math
from pathlib import Path

from mlxkv.scrub import clean, public_name, public_system, put, read_json

FORMAT, VERSION = "mlxkv-bench", 1
ROW_NUMBERS = [
    "prefill_seconds",
    "tokens_per_second",
    "peak_bytes",
    "kv_bytes",
    "baseline_ratio",
    "of_copy",
    "spread",
    "prefill_tokens_per_second",
    "first_token_seconds",
]


def write(data: dict, name: str) -> Path:
    """Write `data` (`run.document`), scrubbed, to the file `name`, or for "" to a new file in the current
    folder. Returns the file."""
    return put(scrubbed(data), name)


def scrubbed(data: dict) -> dict:
    """Copy `data` without host name, user name and paths.

    Of a folder the last name stays, of the system its name, version number and architecture.
    """
    data = json.loads(json.dumps(data))
    data["model"]["name"] = public_name(data["model"]["name"])
    data["machine"]["system"] = public_system(data["machine"]["system"])
    for row in data["rows"]:
        row["error"] = row["error"] and clean(row["error"])
    for gate in data["gates"]:
        gate["reason"] = gate["reason"] and clean(gate["reason"])
    return data


def read(file: Path) -> dict:
    """Read and check a shared file. Raises UserError."""
    return read_json(file, "render", FORMAT, VERSION, _wrong)


def _wrong(data: dict) -> str | None:
    """What is wrong with the contents, or None. Raises KeyError, TypeError or AttributeError if parts
    are missing."""
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
        for name in ROW_NUMBERS:
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
