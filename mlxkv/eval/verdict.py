"""Rate a preset green, amber or red if its intervals allow it, by rules printed in the report, and write the
sentences."""

from __future__ import annotations

from math import isfinite

from mlxkv.eval.arms import BASELINE

# The first rule that fails decides. Retrieval: the share below fp16 in any kind.
LIMITS = {
    "green": {"kl": 0.01, "top1": 0.97, "retrieval": 0.03},
    "amber": {"kl": 0.1, "top1": 0.90, "retrieval": 0.10},
}
OPEN = "open"
RULES = (
    "green: as good as full precision (mean KL at most 0.01, same next token at least 97 %, right answers not shown to "
    "be more than 3 points fewer); amber: close to it (0.1, 90 %, 10 points); red: worse; open: the 95 % intervals "
    "allow more than one of these"
)

VERDICTS = {
    "green": "as good as full precision, by every measure here",
    "amber": "close to full precision: some replies will differ, few for the worse",
    "red": "not as good as full precision",
    OPEN: "undecided: more --samples may settle it",
}


def judge(row: dict) -> tuple[str, str]:
    """Return (colour, reason) of a preset's row; the reason names the broken rule, and what
    retrieval leaves open.

    A colour counts if both ends of the intervals of KL and of same top have it. Retrieval lowers it if the whole
    interval of the loss is above a limit, because few questions prove little.
    """
    judgements = [_colour(row, end) for end in ("best", "worst")]
    lost, proven = _lost(row)
    order = [*LIMITS, "red"]
    if "kl_mean" not in row:
        fits = (colour for colour, limits in LIMITS.items() if lost <= limits["retrieval"])
        judgements = [("green", ""), (next(fits, "red"), "")]
    best, worst = (
        max(judgement, proven, key=lambda judgement: order.index(judgement[0]))
        for judgement in judgements
    )
    if best[0] == worst[0]:
        return best[0], best[1] or _left(row, lost, best[0])
    reason = worst[1] or f"retrieval: {_points(lost)} below fp16 are possible"
    return OPEN, f"{best[0]} or {worst[0]}; {reason}"


def _colour(row: dict, end: str) -> tuple[str, str]:
    """Return the colour, and the broken rule, of one end of the intervals of KL and same top."""
    if "kl_mean" not in row:
        return "green", ""
    if row.get("kl_interval") is None and isfinite(row["kl_mean"]):
        count = row.get("texts", 1)
        shortage = f"{count} text{'s are' if count > 1 else ' is'} too few for an interval"
        return ("green", "") if end == "best" else ("red", shortage)
    low, high = row.get("kl_interval") or [row["kl_mean"]] * 2
    top_low, top_high = row.get("top1_interval") or [row.get("top1", 1.0)] * 2
    kl, top = (low, top_high) if end == "best" else (high, top_low)
    reason = ""
    for colour, limits in LIMITS.items():
        if kl <= limits["kl"] and top >= limits["top1"]:
            return colour, reason
        if not kl <= limits["kl"]:  # a NaN is red too
            reason = f"mean KL {row['kl_mean']:.3g} [{low:.3g}, {high:.3g}]"
        else:
            reason = (
                f"same top {100 * row['top1']:.1f} % [{100 * top_low:.1f}, {100 * top_high:.1f}]"
            )
    return "red", reason


def _lost(row: dict) -> tuple[float, tuple[str, str]]:
    """Return the largest possible loss of retrieval in any kind, and the colour proved by it, with the broken rule."""
    worst, proven = 0.0, ("green", "")
    for kind, (value, low, high) in row.get("retrieval_lost", {}).items():
        worst = max(worst, high)
        text = f"{kind} {_points(value)} [{100 * low:.0f}, {100 * high:.0f}] below fp16"
        if low > LIMITS["amber"]["retrieval"]:
            return worst, ("red", text)
        if low > LIMITS["green"]["retrieval"] and proven[0] == "green":
            proven = "amber", text
    return worst, proven


def _left(row: dict, lost: float, colour: str) -> str:
    """Return the retrieval loss that a verdict on KL leaves open, as a sentence, or an empty string."""
    if colour == "red" or lost <= LIMITS[colour]["retrieval"]:
        return ""
    count = min(row.get("retrieval_values", {"": 0}).values())
    return f"{count} values leave open up to {_points(lost)} below fp16 in retrieval"


def _points(share: float) -> str:
    return f"{100 * share:.0f} points"


def sentences(data: dict, context: int) -> list[tuple[str, str, str]]:
    """Return (preset, verdict, sentences) of every preset except full precision at a context."""
    rows = data["rows"][str(context)]
    base = rows[BASELINE]
    return [
        (name, row["verdict"], _said(row, base)) for name, row in rows.items() if name != BASELINE
    ]


def _said(row: dict, base: dict) -> str:
    clauses = [VERDICTS[row["verdict"]].capitalize() + "."]
    if row["reason"]:
        clauses.append(f"{'It may be' if row['verdict'] == OPEN else 'Why:'} {row['reason']}.")
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
