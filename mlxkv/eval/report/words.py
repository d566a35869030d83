"""Say in sentences what a report's tables show, for readers who do not know the measures."""

from __future__ import annotations

from mlxkv.eval.arms import BASELINE
from mlxkv.eval.report.verdict import OPEN

VERDICTS = {
    "green": "as good as full precision, by every measure here",
    "amber": "close to full precision: some replies will differ, few for the worse",
    "red": "not as good as full precision",
    OPEN: "not decided: too little was read for a verdict",
}


def sentences(data: dict, context: int) -> list[tuple[str, str, str]]:
    """Return (preset, verdict, sentences) of every preset but full precision at a context."""
    rows = data["rows"][str(context)]
    base = rows[BASELINE]
    return [
        (name, row["verdict"], _said(row, base)) for name, row in rows.items() if name != BASELINE
    ]


def _said(row: dict, base: dict) -> str:
    clauses = [VERDICTS[row["verdict"]].capitalize() + "."]
    if row["reason"]:
        clauses.append(f"Why: {row['reason']}.")
    if "kv_bytes_in_use" in row:
        factor = base["kv_bytes_in_use"] / row["kv_bytes_in_use"]
        clauses.append(
            f"Its cache takes {mebibytes(row['kv_bytes_in_use'])} MiB where full precision takes "
            f"{mebibytes(base['kv_bytes_in_use'])}: {factor:.1f} times less."
        )
    if "top1" in row:
        clauses.append(
            f"The likeliest next token is the same {100 * row['top1']:.1f} % of the time."
        )
    if "retrieval" in row:
        kinds = row["retrieval"]
        share, full = (
            sum(shares[k] for k in kinds) / len(kinds) for shares in (kinds, base["retrieval"])
        )
        clauses.append(
            f"It finds {100 * share:.0f} % of the facts asked for; full precision {100 * full:.0f} %."
        )
    return " ".join(clauses)


def mebibytes(count: float) -> str:
    size = count / 2**20
    return f"{size:.2f}" if size < 10 else f"{size:,.0f}"
