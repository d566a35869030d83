"""`mlxkv doctor`: versions, machine, backends, and the golden table on this very machine."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from mlxkv import __version__
from mlxkv.console import human_bytes, print_json, print_table
from mlxkv.fit import machine_memory

PACKAGES = ("mlx", "mlx-lm", "numpy", "safetensors", "transformers", "huggingface-hub")
OUTPUTS = ("attend", "keys", "values")
KERNEL_PRESETS = ("int8", "int4", "srft-int4+g64", "int3", "int2", "oscar-int2")
KERNEL_DIMS = (64, 128, 256)
METHOD_PRESETS, METHOD_DIMS = (  # the other methods, at one head dim: building takes its time
    ("turbo-int3", "turbo-int3+qjl", "polar-tree+online", "kivi-int2", "kvarn-int4", "polar")
    + ("static-0.75", "oja-0.75+int4"),  # the second: two bases in one pass
    (128,),
)
_KERNEL_CASES = ((KERNEL_PRESETS, KERNEL_DIMS), (METHOD_PRESETS, METHOD_DIMS))
Step = Callable[[str], None]  # told what is being computed
OPTIONAL = ("mlx-metal", "mlx-cpu", "mlx-cuda-13", "mlx-cuda-12", "torch", "triton")


def versions() -> dict[str, str | None]:
    """Installed versions; an optional package that is missing is left out."""
    found = {"mlxkv": __version__}
    found |= {name: _version(name) for name in PACKAGES + OPTIONAL}
    return {name: text for name, text in found.items() if text or name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def out_of_range() -> list[str]:
    """Dependencies whose installed version lies outside the range that mlxkv was tested with."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in requires("mlxkv") or []]
    except PackageNotFoundError:
        return []  # a source tree on the path, not installed
    wrong = []
    for need in wanted:
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        found = _version(need.name)
        if found is None or not need.specifier.contains(found, prereleases=True):
            wrong.append(f"{need.name} {found or 'missing'}, wanted {need.specifier}")
    return wrong


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


def golden_rows(step: Step) -> list[dict]:
    """The golden table, run here."""
    from mlxkv import golden

    rows = []
    for row in golden.rows():
        rows.append(row.as_dict())
        step(f"golden table: {row.table} {row.case}")
    return rows


def kernel_rows(step: Step) -> list[dict]:
    """Both bodies of the kernels for each preset and the usual head dims, and for a preset of every
    other method, built and compared with plain ops here. Tiles that pass on a Mac are used there from now on.

    `reason` is None for kernels that are right, else why they are not used.
    """
    import mlx.core as mx

    from mlxkv import kernels, records, selftest, tiles, trust
    from mlxkv.config import parse_kv
    from mlxkv.metal import launch

    make, rows = launch.factory(), []
    if make is None:
        return [
            {"preset": p, "head_dim": d, "body": "", "reason": launch.absent()}
            for presets, dims in _KERNEL_CASES
            for p in presets
            for d in dims
        ]
    cases = [(preset, dims) for presets, dims in _KERNEL_CASES for preset in presets]
    for preset, head_dims in cases:
        config = parse_kv(preset)
        for dims in head_dims:
            stored = config.dims(dims, dims)
            for body in ("portable", "tiles"):
                row = {"preset": preset, "head_dim": dims, "body": body, "reason": None}
                rows.append(row)
                step(f"kernels: {preset}, head dim {dims}, {body}")
                row["reason"] = records.why_not(config.keys.quantizer, stored[0], config.page)
                if row["reason"] is None and body == "tiles":
                    layout = kernels.record_layout(config, *stored)
                    row["reason"] = tiles.why_not(layout, dims, mx.float16, make)
                    if row["reason"] == trust.UNTRIED:
                        row["reason"] = None
                if row["reason"] is None:
                    found = selftest.test(config, dims, mx.float16, make, body == "tiles")
                    row |= {"errors": found.errors, "ties": found.ties, "reason": found.reason}
    if make is mx.fast.metal_kernel:
        trust.note(all(row["reason"] is None for row in rows if row["body"] == "tiles"))
    return rows


def run(as_json: bool) -> int:
    """The command. Returns 1 when something is wrong with this machine's results or versions."""
    # The table checks float32: a GPU's shortened products would only show themselves.
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    wrong = out_of_range()
    data = {
        "machine": machine(),
        "versions": versions(),
        "out_of_range": wrong,
        "backends": backends(),
    }
    # Minutes on a GPU: every case builds kernels of its own.
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

        data |= {"golden": golden_rows(step), "kernels": kernel_rows(step)}
    failed = [row for row in data["golden"] if not row["ok"]]
    if as_json:
        print_json(data)
    else:
        _show(data)
    return 1 if failed or wrong else 0


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
        rows = [
            [
                *(row[key] for key in ("preset", "head_dim", "body")),
                *(f"{row['errors'][n]:.1e}" if row.get("errors") else "" for n in OUTPUTS),
                f"{row['ties']:.1e}" if row.get("errors") else "",
                row["reason"] or "right",
            ]
            for row in data["kernels"]
        ]
        heads = [f"rms {name}" for name in OUTPUTS]
        print_table(["kernels of", "head dim", "body", *heads, "ties", "here"], rows)
    print("ties: codes one step off where the spec's value lies at a rounding boundary")
    print(
        f"golden table: {sum(row['ok'] for row in golden)} of {len(golden)} cases right on {used}"
    )


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
