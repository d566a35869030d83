"""Rows from single runs: medians, spreads, ratios; and their table on a terminal. No framework."""

from __future__ import annotations

from statistics import median

from mlxkv import console
from mlxkv.bench.options import BASELINE
from mlxkv.bench.show import ratio_text, spread, weights_text

NUMBERS = [
    "prefill_seconds",
    "prefill_tokens_per_second",
    "first_token_seconds",
    "tokens_per_second",
    "token_ms",
    "peak_bytes",
    "kv_bytes",
    "read_bytes",
]
COLUMNS = (
    "context",
    "preset",
    "first token s",
    "prefill tok/s",
    "decode tok/s",
    "of fp16",
    "spread",
    "of copy",
    "peak",
    "cache",
)
NOISY = 0.2  # a larger spread makes ratios unreliable


def row(preset: str, context: int, runs: list[dict], error: str | None) -> dict:
    """The medians over `runs`; None everywhere if there are none. error: what ended the arm."""
    out = {"preset": preset, "context": context, "by": runs[0]["by"] if runs else None}
    out |= medians(runs) | {"spread": None, "first_token_spread": None}
    if runs:
        out["spread"] = spread([run["tokens_per_second"] for run in runs])
        out["first_token_spread"] = spread([run["first_token_seconds"] for run in runs])
    return out | {"runs": len(runs), "error": error}


def medians(runs: list[dict]) -> dict:
    """The median of each of NUMBERS, bytes as whole numbers; None for what was not measured."""
    out = {}
    for key in NUMBERS:
        values = [run[key] for run in runs if run[key] is not None]
        kind = int if key.endswith("bytes") else float
        out[key] = kind(median(values)) if values else None
    return out


def add_ratios(rows: list[dict]) -> None:
    """Add baseline_ratio to every row: decode speed over the speed of fp16 at the same context."""
    plain = {r["context"]: r["tokens_per_second"] for r in rows if r["preset"] == BASELINE}
    for r in rows:
        speed, base = r["tokens_per_second"], plain.get(r["context"])
        r["baseline_ratio"] = speed / base if speed and base else None


def add_shares(rows: list[dict], weight_bytes: int, copy_bytes_per_second: float) -> None:
    """Add of_copy to every row: the share of the copy bandwidth that reading weights and cache takes."""
    for r in rows:
        r["of_copy"] = None
        if r["tokens_per_second"] and copy_bytes_per_second:
            read = (weight_bytes + r["read_bytes"]) * r["tokens_per_second"]
            r["of_copy"] = read / copy_bytes_per_second


def cells(r: dict) -> list[str]:
    """The cells of COLUMNS, "-" for what was not measured."""
    if not r["runs"]:
        return [str(r["context"]), r["preset"], *["-"] * (len(COLUMNS) - 2)]
    return [
        str(r["context"]),
        r["preset"] + ("*" if r["error"] else ""),
        *speed_cells(r),
        ratio_text(r["of_copy"]),
        console.human_bytes(r["peak_bytes"]),
        console.human_bytes(r["kv_bytes"]),
    ]


def speed_cells(r: dict) -> list[str]:
    """The cells from "first token s" to "spread"."""
    first, prefill = r["first_token_seconds"], r["prefill_tokens_per_second"]
    return [
        f"{first:.3f}" if first else "-",
        f"{prefill:.0f}" if prefill else "-",
        f"{r['tokens_per_second']:.1f}",
        ratio_text(r["baseline_ratio"]),
        f"{100 * r['spread']:.0f} %" if r["runs"] > 1 else "-",
    ]


def show(data: dict) -> None:
    """Print the table, what went wrong, and how to read it."""
    model, rows, settings = data["model"], data["rows"], data["settings"]
    weights = weights_text(model["weights"], model["bits"])
    title = f"{model['name']}, {weights}, {model['dtype']}"
    if data["interrupted"]:
        title += " (interrupted: what was measured so far)"
    console.print_table(COLUMNS, [cells(r) for r in rows], title)
    for r in rows:
        if r["error"]:  # in a column it would be some letters wide
            print(f"{r['preset']} at {r['context']} went wrong: {console.one_line(r['error'])}")
    if noisy := [r for r in rows if r["spread"] and r["spread"] > NOISY]:
        names = ", ".join(f"{r['preset']} at {r['context']}" for r in noisy)
        print(
            f"NOISY: runs differ by more than {100 * NOISY:.0f} %, ratios are unreliable: {names}"
        )
    for gate in data["gates"]:
        print(gate_line(gate))
    paths = dict.fromkeys(f"{r['preset']}: {r['by']}" for r in rows if r["by"])
    if paths:
        print("attention by " + " · ".join(paths))
    print(
        f"each run is a fresh process; medians of up to {2 * settings['rounds']} runs in the order A B B A; "
        f"*: a later run failed; spread: between these runs\n"
        f"decode: {settings['tokens']} tokens after the context, sealing pages included; peak: since "
        "loading, weights included; cache: allocated\n"
        f"of copy: (weights {console.human_bytes(model['weight_bytes'])} + stored cache) x tokens/s "
        f"over the {data['machine']['copy_gb_s']:.1f} GB/s of a copy on this machine\n"
        "mlx-lm-kv: mlx-lm's own quantized cache, groups of 64, from the first token on"
    )


def gate_line(gate: dict) -> str:
    """Return whether a preset is right, in one line."""
    if not gate["ok"]:
        return f"{gate['preset']}: NOT TIMED: {gate['reason']}"
    shapes = []
    for check in gate["checks"]:
        parts = [
            f"{name} {check['errors'][name]:.1e} of {check['bounds'][name]:.1e}"
            for name in ("attention", "keys", "values")
        ]
        shapes.append(f"{check['shape']}: rms {', '.join(parts)}")
    return f"{gate['preset']}: right ({'; '.join(shapes)})"
