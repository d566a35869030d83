"""Print the tables of docs/results/frontier.md: `python -m experiments.frontier.page docs/results/frontier/*.jsonl`.

--picture FILE draws KL against bits read; --beside adds published methods, in rows of `evidence`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.evidence import rows, table
from experiments.frontier import every
from experiments.frontier.corpus import KL
from experiments.options import Parser
from experiments.pages.smaller import smaller
from mlxkv import console
from mlxkv.eval import intervals
from mlxkv.eval.intervals import Interval

MODELS = ("natural-qwen", "natural-gemma")
Arms = dict[str, dict]  # by name


def read(files: Sequence[Path]) -> tuple[dict[tuple, Arms], list[dict]]:
    """Return the arms by model and context, and what an oracle needs."""
    found, needs = {}, []
    for file in files:
        texts = None
        for line in file.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            if "arm" in one:
                if "kl" in one:
                    texts = one.setdefault("texts", texts)
                found.setdefault((one["model"], one["context"]), {})[one["arm"]] = one
            else:
                needs.append(one)
    return found, needs


def ratio(arms: Arms, ours: str, theirs: str) -> Interval | None:
    """Return the ratio of mean KL on the texts that both have, or None without any."""
    if ours not in arms or theirs not in arms:
        return None
    by = [
        dict(zip(arms[n].get("texts", ()), arms[n].get("kl", ()), strict=True))
        for n in (ours, theirs)
    ]
    both = [text for text in by[0] if text in by[1]]
    return intervals.ratio(*([one[text] for text in both] for one in by)) if both else None


def lower(arms: Arms, ours: str, theirs: str) -> str:
    """Return on how many texts `ours` has the lower KL."""
    pairs = list(zip(arms[ours]["kl"], arms[theirs]["kl"], strict=True))
    return f"{sum(a < b for a, b in pairs)} of {len(pairs)}"


def told(found: Interval | None) -> str:
    if found is None:
        return ""
    return table.ratio(found) if found.holds(1.0) else f"**{table.ratio(found)}**"


def tables(found: dict[tuple, Arms]) -> list[str]:
    """Return a table for each model and context: an arm a line, beside those of equal bits."""
    lines = []
    for (model, context), arms in found.items():
        texts = max(len(one.get("kl", ())) for one in arms.values())
        lines += [f"### {model}, {context} tokens, {texts} texts", ""]
        heads = (
            "arm",
            "bits read",
            "mean KL [95 %]",
            "of `int2`'s",
            "of `fill-2.25`'s",
            "beside",
            "accepted %",
        )
        lines += [table.line(heads), table.line(["---"] * len(heads))]
        against = {arm.name: arm.against for arm in every.arms()}
        for name, one in arms.items():
            if "kl" not in one:
                continue
            others = [
                x for x in against.get(name, ()) if x not in ("int2", "fill-2.25") and x in arms
            ]
            beside = [f"{told(ratio(arms, name, x))} of `{x}`'s" for x in others]
            pair = [told(ratio(arms, name, x)) if x != name else "1" for x in ("int2", "fill-2.25")]
            mean = table.with_limits(intervals.mean(one["kl"]))
            accepted = f"{100 * np.mean(one['accepted']):.1f}"
            cells = (f"`{name}`", f"{one['bits']:.2f}", mean, *pair, "; ".join(beside), accepted)
            lines.append(table.line(cells))
        lines.append("")
    return lines


def answered(found: dict[tuple, Arms]) -> list[str]:
    """Return a table for each model with questions: an arm a line, and the interval of Wilson."""
    lines = []
    for (model, context), arms in found.items():
        asked = {name: one["right"] for name, one in arms.items() if "right" in one}
        if not asked:
            continue
        documents = max(map(len, asked.values()))
        lines += [f"### {model}, questions about {documents} documents of {context} tokens", ""]
        heads = "arm", "bits read", "right", "% [95 %]"
        lines += [table.line(heads), table.line(["---"] * len(heads))]
        for name, some in asked.items():
            right, of = map(sum, zip(*some, strict=True))
            low, high = (100 * x for x in intervals.wilson(right, of).as_list())
            share = f"{100 * right / of:.1f} [{low:.0f}, {high:.0f}]"
            bits = f"{arms[name]['bits']:.2f}"
            lines.append(table.line((f"`{name}`", bits, f"{right} of {of}", share)))
        lines.append("")
    return lines


def needed(needs: Sequence[dict], size: int = 64) -> list[str]:
    """Return a table: the share of pages that an oracle reads, by layer."""
    heads = (
        "model",
        "layer",
        "90 %",
        "95 %",
        "99 %",
        "95 %, by query head",
        "95 % for heads that share keys",
    )
    lines = [table.line(heads), table.line(["---"] * len(heads))]
    for one in needs:
        if one["page"] == size:
            means = [f"{np.mean(one[f'need {mass}']):.2f}" for mass in ("0.9", "0.95", "0.99")]
            own = (
                " ".join(f"{x:.2f}" for x in one[f"{name} 0.95"]) for name in ("need", "need_kv")
            )
            lines.append(table.line((one["model"], str(one["layer"]), *means, *own)))
    return [*lines, ""]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser("frontier.page", __doc__)
    parser.add_argument("files", type=Path, nargs="+", help="what frontier.compact wrote")
    parser.add_argument("--picture", type=Path, help="an SVG to write")
    parser.add_argument(
        "--beside", type=Path, nargs="*", default=[], help="rows of published methods"
    )
    args = parser.parse_args(arguments)
    found, needs = read(args.files)
    print("\n".join([*tables(found), *answered(found), *needed(needs)]))
    if args.picture:
        from experiments.frontier import picture

        beside = [row for row in rows.read(args.beside) if row["task"] == KL and "error" not in row]
        args.picture.write_text(smaller(picture.panels(found, beside)), encoding="utf-8")
        console.note(str(args.picture))


if __name__ == "__main__":
    console.run_tool(main)
