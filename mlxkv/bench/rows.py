"""From single runs to rows: medians, spreads, ratios; and the table on a terminal."""

from __future__ import annotations

from statistics import median

from mlxkv import console
from mlxkv.bench.plan import BASELINE

NUMBERS = (
    *("prefill_seconds", "prefill_tokens_per_second", "first_token_seconds"),
    *("tokens_per_second", "token_ms", "peak_bytes", "kv_bytes", "read_bytes"),
)
COLUMNS = (
    *("context", "preset", "first token s", "prefill tok/s", "decode tok/s", "of fp16", "spread"),
    *("of copy", "peak", "cache"),
)
NOISY = 0.2  # a spread above which a ratio says little


def row(preset: str, context: int, runs: list[dict], error: str | None) -> dict:
    """The medians over `runs`; None everywhere if there are none. error: what ended the arm."""
    out = {"preset": preset, "context": context, "by": runs[0]["by"] if runs else None}
    for key in NUMBERS:
        values = [run[key] for run in runs]
        kind = int if key.endswith("bytes") else float
        out[key] = kind(median(values)) if values else None
    for key, name in (
        ("spread", "tokens_per_second"),
        ("first_token_spread", "first_token_seconds"),
    ):
        values = [run[name] for run in runs]
        out[key] = (max(values) - min(values)) / median(values) if values else None
    return out | {"runs": len(runs), "error": error}


def compare(rows: list[dict], weight_bytes: int, copy_bytes_per_second: float) -> None:
    """Adds to every row: baseline_ratio, decode speed over that of fp16 at the same context; and
    of_copy, the share of the copy bandwidth that reading weights and cache takes."""
    plain = {r["context"]: r["tokens_per_second"] for r in rows if r["preset"] == BASELINE}
    for r in rows:
        speed, base = r["tokens_per_second"], plain.get(r["context"])
        r["baseline_ratio"] = speed / base if speed and base else None
        r["of_copy"] = None
        if speed and copy_bytes_per_second:
            read = (weight_bytes + r["read_bytes"]) * speed
            r["of_copy"] = read / copy_bytes_per_second


def cells(r: dict) -> list[str]:
    """The cells of COLUMNS, "-" for what was not measured."""
    if not r["runs"]:
        return [str(r["context"]), r["preset"], *["-"] * (len(COLUMNS) - 2)]
    return [
        *(str(r["context"]), r["preset"] + ("*" if r["error"] else "")),
        f"{r['first_token_seconds']:.3f}",
        f"{r['prefill_tokens_per_second']:.0f}",
        f"{r['tokens_per_second']:.1f}",
        f"{r['baseline_ratio']:.2f}" if r["baseline_ratio"] else "-",
        f"{100 * r['spread']:.0f} %" if r["runs"] > 1 else "-",
        f"{r['of_copy']:.2f}" if r["of_copy"] else "-",
        console.human_bytes(r["peak_bytes"]),
        console.human_bytes(r["kv_bytes"]),
    ]


def show(data: dict) -> None:
    """The table, what went wrong, and how to read it."""
    model, rows, settings = data["model"], data["rows"], data["settings"]
    weights = "random weights" if model["weights"] == "random" else "weights as stored"
    if model["bits"]:
        weights += f" in {model['bits']} bits"
    failed = any(r["error"] for r in rows)
    columns = (*COLUMNS, "what went wrong") if failed else COLUMNS
    table = [[*cells(r), *([r["error"] or ""] if failed else [])] for r in rows]
    title = f"{model['name']}, {weights}, {model['dtype']}"
    if data["interrupted"]:
        title += " (interrupted: what was measured so far)"
    console.print_table(columns, table, title)
    if noisy := [r for r in rows if r["spread"] and r["spread"] > NOISY]:
        names = ", ".join(f"{r['preset']} at {r['context']}" for r in noisy)
        print(f"NOISY: runs apart by more than {100 * NOISY:.0f} %, ratios say little: {names}")
    for gate in data["gates"]:
        print(gate_line(gate))
    paths = dict.fromkeys(f"{r['preset']}: {r['by']}" for r in rows if r["by"])
    if paths:
        print("attention by " + " · ".join(paths))
    print(
        f"each run a fresh process, medians of up to {2 * settings['rounds']} in the order A B B A; "
        f"* an arm that failed later; spread: between these runs\n"
        f"decode: {settings['tokens']} tokens behind the context, sealed pages included; peak: since "
        "loading, weights included; cache: allocated\n"
        f"of copy: (weights {console.human_bytes(model['weight_bytes'])} + stored cache) x tokens/s "
        f"over the {data['machine']['copy_gb_s']:.1f} GB/s that a copy moves here\n"
        "mlx-lm-kv: mlx-lm's own quantized cache, groups of 64, from the first token on"
    )


def gate_line(gate: dict) -> str:
    """One preset's correctness in one line."""
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
