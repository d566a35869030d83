"""Judge a preset as green, amber or red, by rules that the report prints."""

from __future__ import annotations

# The first rule that fails decides. Retrieval: points below fp16 in any kind.
LIMITS = {
    "green": {"kl_mean": 0.01, "top1": 0.97, "retrieval": 0.03},
    "amber": {"kl_mean": 0.1, "top1": 0.90, "retrieval": 0.10},
}
RULES = (
    "green: mean KL at most 0.01, same top at least 97 %, retrieval at most 3 points (or one value) below fp16; "
    "amber: 0.1, 90 %, 10 points; red: worse"
)


def judge(row: dict, base: dict) -> tuple[str, str]:
    """Return (colour, reason) of a preset's row against fp16's; the reason names the broken rule.

    "retrieval_values" in a row: how many values were asked for, so that one lost value is allowed.
    """
    reason = ""
    for colour, limits in LIMITS.items():
        failed = _failed(row, base, limits)
        if failed is None:
            return colour, reason
        reason = failed
    return "red", reason


def _failed(row: dict, base: dict, limits: dict) -> str | None:
    """Return what breaks these limits, or None."""
    kl = row.get("kl_mean", 0.0)
    if not kl <= limits["kl_mean"]:  # a NaN is red too
        return f"mean KL {kl:.3g}"
    if row.get("top1", 1.0) < limits["top1"]:
        return f"same top {100 * row['top1']:.1f} %"
    for kind, share in row.get("retrieval", {}).items():
        lost = base["retrieval"][kind] - share
        asked = row.get("retrieval_values", {}).get(kind, 1000)
        if lost > max(limits["retrieval"], 1 / asked) + 1e-9:
            return f"{kind} {100 * lost:.0f} points below fp16"
    return None
