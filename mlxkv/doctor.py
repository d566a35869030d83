"""`mlxkv doctor`: versions, machine, backends, and the golden table on this very machine."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from mlxkv.console import human_bytes, note, print_json, print_table
from mlxkv.fit import machine_memory
from mlxkv.versions import out_of_range, versions

OUTPUTS = ("attend", "keys", "values", "prefill")
Step = Callable[[str], None]  # told what is being computed


def machine() -> dict[str, object]:
    """Operating system, chip and memory."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "chip": _chip(),
        "memory_bytes": machine_memory(),
    }


def _chip() -> str:
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def backends() -> list[dict[str, object]]:
    """Each backend of MLX: found or not, and whether it is the one in use."""
    import mlx.core as mx

    from mlxkv.generate import backend

    found = {"metal": mx.metal.is_available(), "cuda": mx.cuda.is_available(), "cpu": True}
    rows = []
    for name, there in found.items():
        device = ""
        if name == backend():
            device = str(mx.device_info().get("device_name", ""))
        rows.append({"name": name, "found": there, "used": name == backend(), "device": device})
    return rows


def golden_rows(step: Step, every: bool = False) -> list[dict]:
    """The golden table, run here. every: by kernels where there are any, which are built for each row of
    attention, minutes in all; otherwise by plain ops, which the kernels are compared with."""
    from mlxkv import golden
    from mlxkv.metal import launch

    rows = []
    with nullcontext() if every else launch.using(None):
        for row in golden.rows():
            rows.append(row.as_dict())
            step(f"golden table: {row.table} {row.case}")
    return rows


def run(as_json: bool, every: bool = False, share: str | None = None) -> int:
    """The command. Returns 1 when something is wrong with this machine's results or versions, or when
    a kernel that should run here does not.

    every: all kernels, however long that takes. share: a file to write for an issue, "" for one that is
    named after this machine.
    """
    from mlxkv import checks, machines

    # The table checks float32: a GPU's shortened products would only show themselves.
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    wrong = out_of_range()
    data = {
        "machine": machine(),
        "versions": versions(),
        "out_of_range": wrong,
        "backends": backends(),
    }
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bars:
        bar = bars.add_task("golden table")

        def step(what: str) -> None:
            bars.update(bar, description=what)

        data["golden"] = golden_rows(step, every)
        data["kernels"] = checks.rows(step, every)
    data["kernels_left"] = checks.left(data["kernels"])
    failed = [row for row in data["golden"] if not row["ok"]]
    not_running = checks.failures(data["kernels"])
    if share is not None:
        note(f"written: {machines.write(data, share)}")
    if as_json:
        print_json(data)
    else:
        _show(data)
    return 1 if failed or wrong or not_running else 0


def _show(data: dict) -> None:
    info = data["machine"]
    print(f"{info['chip']} · {human_bytes(info['memory_bytes'])} · {info['system']}")
    print(f"python {info['python']}")
    for name, text in data["versions"].items():
        print(f"{name} {text or 'missing'}")
    for text in data["out_of_range"]:
        print(f"outside the tested range: {text}")
    rows = [
        [
            row["name"],
            "yes" if row["found"] else "no",
            "in use" if row["used"] else "",
            row["device"],
        ]
        for row in data["backends"]
    ]
    print_table(["backend", "found", "", "device"], rows)
    golden = data["golden"]
    used = next(row["name"] for row in data["backends"] if row["used"])
    print_table(
        ["golden table", "cases", "values", "ties", "wrong", "rms", "bound", "right"],
        _by_table(golden),
    )
    for row in golden:
        if not row["ok"]:
            print(
                f"WRONG: {row['table']} {row['case']}: {row['wrong']} values, rms {row['rms']:.3g}"
            )
    reasons = {row["reason"] for row in data["kernels"]}
    if len(reasons) == 1 and not any(row["body"] for row in data["kernels"]):
        print(f"kernels: not used: {reasons.pop()}")
    else:
        _show_kernels(data["kernels"], data["kernels_left"])
    print("ties: codes one step off where the spec's value lies at a rounding boundary")
    print(
        f"golden table: {sum(row['ok'] for row in golden)} of {len(golden)} cases right on {used}"
    )


def _show_kernels(kernels: list[dict], left: dict | None) -> None:
    rows = [
        [
            *(row[key] for key in ("preset", "head_dim", "body")),
            row["state"] if row["state"] != "none" else "-",
            *(f"{row['errors'][n]:.1e}" if row.get("errors") else "" for n in OUTPUTS),
            f"{row['ties']:.1e}" if row.get("errors") else "",
            *(f"{row[n]:.0f}" if row[n] else "" for n in ("attend_us", "plain_us")),
            f"{row['speedup']:.1f}x" if row["speedup"] else "",
            f"{row['seconds']:.1f}" if row["seconds"] is not None else "",
        ]
        for row in kernels
        if row["state"] != "not tried"
    ]
    heads = [f"rms {name}" for name in OUTPUTS]
    print_table(
        [
            *("kernels of", "head dim", "body", "here", *heads, "ties"),
            *("us", "plain ops us", "faster", "build s"),
        ],
        rows,
    )
    whys: dict[str, list[str]] = {}
    for row in kernels:
        if row["reason"] and row["state"] != "not tried":
            mark = "WRONG: " if row["should_run"] else ""
            name = f"{row['preset']} {row['head_dim']} {row['body']}"
            whys.setdefault(f"{mark}{{}}: {row['reason']}", []).append(name)
    for why, names in whys.items():
        print(why.replace("{}", ", ".join(names), 1))
    right = sum(row["state"] == "right" for row in kernels)
    tried = [row for row in kernels if row["should_run"] and row["state"] != "not tried"]
    print(f"kernels: {right} of {len(tried)} that should run here are right")
    if left:
        names = f" ({'; '.join(left['names'])}, and other methods)" if left["names"] else ""
        more = f", about {left['seconds']:.0f} s" if left["seconds"] else ""
        print(f"not tried: {left['rows']} more{names}{more}: mlxkv doctor --all")


def _by_table(golden: list[dict]) -> list[list[object]]:
    """One line per table: sums, and the worst error with its bound."""
    tables: dict[str, list[dict]] = {}
    for row in golden:
        tables.setdefault(row["table"], []).append(row)
    return [
        [
            name,
            len(rows),
            *(sum(row[key] for row in rows) for key in ("values", "differ", "wrong")),
            f"{max(row['rms'] for row in rows):.1e}",
            f"{max(row['bound'] for row in rows):.1e}",
            "yes" if all(row["ok"] for row in rows) else "NO",
        ]
        for name, rows in tables.items()
    ]
