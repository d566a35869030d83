"""`mlxkv doctor`: check versions, backends, the golden table and the kernels on this machine."""

from __future__ import annotations

import time
from contextlib import nullcontext

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from mlxkv import startup
from mlxkv.console import human_bytes, note, print_json, print_table, say
from mlxkv.doctor import checks
from mlxkv.doctor.checks import Step
from mlxkv.doctor.share import check_place, write_share
from mlxkv.machine import machine, out_of_range, versions

OUTPUTS = ("attend", "keys", "values", "prefill")


def golden_rows(step: Step, every: bool = False) -> list[dict]:
    """Run the golden table here.

    every: use kernels, if any, which takes minutes: each row of attention builds its own. Otherwise use plain ops, the
    reference of the kernels.
    """
    from mlxkv.doctor.golden import TABLE
    from mlxkv.metal import launch

    rows = []
    with nullcontext() if every else launch.using(None):
        for _, row in TABLE.by_set():
            rows.append(row.as_dict())
            step(f"formats: {row.table} {row.case}")
    return rows


def backends() -> list[dict]:
    """Return a row for each backend of MLX: whether it exists, and whether it is in use."""
    import mlx.core as mx

    from mlxkv.metal import gpu

    found = {"metal": mx.metal.is_available(), "cuda": mx.cuda.is_available(), "cpu": True}
    here = gpu.device()
    rows = []
    for name in found:
        is_used = name == here["backend"]
        device = here["device"] if is_used else ""
        rows.append({"name": name, "found": found[name], "used": is_used, "device": device})
    return rows


def run_doctor(*, every: bool, share: str | None, as_json: bool) -> int:
    """Check and print. Returns 1 if a golden row is wrong, a version is out of range, or a kernel that
    should run here fails.

    every: try all kernels. share: a file to write for an issue, "" for a new one here.
    """
    if share:
        check_place(share)
    # The table checks float32, and TF32 products are not float32.
    startup.whole_float32()
    wrong = out_of_range()
    data = {
        "machine": machine(),
        "versions": versions(),
        "out_of_range": wrong,
        "backends": backends(),
    }
    out = Console(stderr=True)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=out,
        transient=True,
        disable=not out.is_terminal,
    ) as bars:
        bar = bars.add_task("formats")

        said = time.monotonic()
        if every and not out.is_terminal:
            note("checking every format and kernel: this takes minutes")

        def step(what: str) -> None:
            nonlocal said
            bars.update(bar, description=what)
            if not out.is_terminal and time.monotonic() - said >= 60:
                said = time.monotonic()
                note(what)

        data["golden"] = golden_rows(step, every)
        data["kernels"] = checks.rows(step, every)
    data["kernels_left"] = checks.left(data["kernels"], checks.NEEDED)
    failed = [row for row in data["golden"] if not row["ok"]] + checks.failed(data["kernels"])
    if share is not None:
        note(f"written: {write_share(data, share)}")
    if as_json:
        print_json(data)
    else:
        _show(data, every)
    return 1 if failed or wrong else 0


def _show(data: dict, every: bool) -> None:
    info = data["machine"]
    say(f"{info['chip']} · {human_bytes(info['memory_bytes'])} · {info['system']}")
    say(f"python {info['python']}")
    for name, text in data["versions"].items():
        say(f"{name} {text or 'missing'}")
    for text in data["out_of_range"]:
        say(f"outside the tested range: {text}")
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
    if every:
        print_table(
            ["formats", "cases", "values", "ties", "wrong", "rms", "bound", "right"],
            _by_table(golden),
        )
        say("ties: codes one step off because the spec's value is at a rounding boundary")
    for row in golden:
        if not row["ok"]:
            say(f"WRONG: {row['table']} {row['case']}: {row['wrong']} values, rms {row['rms']:.3g}")
    reasons = {row["reason"] for row in data["kernels"]}
    if len(reasons) == 1 and not any(row["body"] for row in data["kernels"]):
        say(f"kernels: not used: {reasons.pop()}")
    else:
        _show_kernels(data["kernels"], data["kernels_left"])
    say(f"formats: {sum(row['ok'] for row in golden)} of {len(golden)} cases right on {used}")


def _show_kernels(kernels: list[dict], untried: dict | None) -> None:
    rows = [
        [
            row["preset"],
            row["head_dim"],
            row["body"],
            row["state"] if row["state"] != checks.NONE else "-",
            *(f"{row['errors'][n]:.1e}" if row.get("errors") else "" for n in OUTPUTS),
            f"{row['ties']:.1e}" if row.get("errors") else "",
            f"{row['attend_us']:.0f}{_predicted(row)}" if row["attend_us"] else "",
            f"{row['plain_us']:.0f}" if row["plain_us"] else "",
            f"{row['speedup']:.1f}x" if row["speedup"] else "",
            f"{row['seconds']:.1f}" if row["seconds"] is not None else "",
        ]
        for row in kernels
        if row["state"] != checks.NOT_TRIED
    ]
    heads = [f"rms {name}" for name in OUTPUTS]
    print_table(
        [
            "kernels of",
            "head dim",
            "body",
            "here",
            *heads,
            "ties",
            "us",
            "plain ops us",
            "faster",
            "build s",
        ],
        rows,
    )
    if any(row["predicted_us"] for row in kernels):
        say("us in brackets: predicted for this GPU (docs/internals/apple.md)")
    reasons: dict[str, list[str]] = {}
    for row in kernels:
        if row["reason"] and row["state"] != checks.NOT_TRIED:
            mark = "WRONG: " if row["should_run"] else ""
            name = f"{row['preset']} {row['head_dim']} {row['body']}"
            reasons.setdefault(f"{mark}{{}}: {row['reason']}", []).append(name)
    for reason, names in reasons.items():
        say(reason.replace("{}", ", ".join(names), 1))
    tried = checks.tried(kernels)
    say(f"kernels: {checks.right(tried)} of {len(tried)} that should run here are right")
    if untried:
        names = f" ({'; '.join(untried['names'])}, and other methods)" if untried["names"] else ""
        duration = f", about {untried['seconds']:.0f} s" if untried["seconds"] else ""
        say(f"not tried: {untried['rows']} more{names}{duration}: mlxkv doctor --all")


def _predicted(row: dict) -> str:
    return f" ({row['predicted_us']:.0f})" if row["predicted_us"] else ""


def _by_table(golden: list[dict]) -> list[list[object]]:
    """Return one line per table: sums, and the worst error with its bound."""
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
