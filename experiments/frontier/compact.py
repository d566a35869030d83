"""Keep of a study's rows what its page says: `python -m experiments.frontier.compact ROWS... --out FILE.jsonl`.

A line for each arm: KL and drafts accepted by text, answers by document; a line for each layer and size
of pages: what an oracle needs, a mean over texts by query head and by kv head, with the spread of texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.evidence import rows
from experiments.frontier.corpus import KL
from experiments.frontier.pages import NEED
from experiments.options import Parser
from mlxkv import console

PER_TEXT = ("kl", "accepted")


def arms(found: Sequence[rows.Row]) -> list[dict]:
    """Return a dict for each model, context and arm. Texts are named where they are others than of the arm before."""
    out: dict[tuple, dict] = {}
    for row in found:
        if row["task"] == NEED:
            continue
        where = row["model"], row["context"], row["preset"]
        one = out.setdefault(where, dict(zip(("model", "context", "arm"), where, strict=True)))
        one["bits"] = round(row["bits_per_value"], 4)
        if row["task"] == KL:
            one.setdefault("texts", []).append(row["text"])
            for name in PER_TEXT:
                one.setdefault(name, []).append(float(f"{row[name]:.4g}"))
        else:
            answers = [all(values) for kind in row["right"].values() for values in kind]
            one.setdefault("right", []).append([sum(answers), len(answers)])
    before = None
    for one in out.values():
        if (texts := one.get("texts")) == before and texts is not None:
            del one["texts"]
        before = texts or before
    return list(out.values())


def needs(found: Sequence[rows.Row]) -> list[dict]:
    """Return a dict for each model, layer and size of pages."""
    groups: dict[tuple, list[rows.Row]] = {}
    for row in found:
        if row["task"] == NEED:
            where = row["model"], row["context"], row["layer"], row["page"]
            groups.setdefault(where, []).append(row)
    out = []
    for where, some in groups.items():
        one = dict(zip(("model", "context", "layer", "page"), where, strict=True))
        for name in ("need", "need_kv"):
            for mass in some[0][name]:
                shares = np.array([row[name][mass] for row in some])  # [texts, heads]
                one[f"{name} {mass}"] = [round(float(x), 3) for x in shares.mean(0)]
                one[f"{name} {mass} texts"] = [round(float(x), 3) for x in shares.mean(1)]
        out.append(one)
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser("frontier.compact", __doc__)
    parser.add_argument("rows", type=Path, nargs="+", help="rows.jsonl of studies")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    args = parser.parse_args(arguments)
    found = rows.read(args.rows)
    lines = [json.dumps(one) + "\n" for one in (*arms(found), *needs(found))]
    args.out.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    console.run_tool(main)
