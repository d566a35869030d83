"""Rows of `mlxkv doctor`'s kernels: their states, names and counts. No framework."""

from __future__ import annotations

from collections.abc import Callable

Step = Callable[[str], None]  # takes the name of what is computed next
RIGHT, WRONG, NOT_BUILT, DID_NOT_RUN = "right", "wrong", "not built", "did not run"
NOT_TRIED, NONE = "not tried", "none"
FAILED = (WRONG, NOT_BUILT, DID_NOT_RUN)


def name(row: dict) -> str:
    return f"{row['preset']} at head dim {row['head_dim']}, {row['body']}"


def tried(rows: list[dict]) -> list[dict]:
    """Rows that should run here and were tried."""
    return [row for row in rows if row["should_run"] and row["state"] != NOT_TRIED]


def right(rows: list[dict]) -> int:
    """Return how many rows are right."""
    return sum(row["state"] == RIGHT for row in rows)


def failed(rows: list[dict]) -> list[dict]:
    """Rows that should run here and failed."""
    return [row for row in rows if row["should_run"] and row["state"] in FAILED]


def left(rows: list[dict], needed: tuple[str, ...]) -> dict | None:
    """Rows that were not tried: their number, names (only of the presets `needed`) and estimated seconds.
    None: all were tried."""
    untried = [row for row in rows if row["should_run"] and row["state"] == NOT_TRIED]
    spent = [row["spent"] for row in rows if row["spent"] is not None]
    if not untried:
        return None
    return {
        "rows": len(untried),
        "names": [name(row) for row in untried if row["preset"] in needed],
        "seconds": sum(spent) / len(spent) * len(untried) if spent else None,
    }
