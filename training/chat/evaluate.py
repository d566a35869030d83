"""Ask a model the 300 question forms at temperature 0, as `mlxkv chat` does, and say how many it answers right.

    PYTHONPATH=.:training python -m chat.evaluate tiny-chat --kv fp16,int4 --out training/results/tiny-chat.forms.json

Every reply of a dialogue is the model's own; the last one is judged (chat/forms.py). Ranges are Wilson's, 95 %.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from chat.forms import FILE, Form, read
from mlxkv.chat.session import Session
from mlxkv.models import load

LONGEST = 96  # tokens of a reply


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % range of a share of which `right` of `n` were seen."""
    if not n:
        return 0.0, 1.0
    p, z2 = right / n, z * z / n
    middle, half = (p + z2 / 2) / (1 + z2), z * (p * (1 - p) / n + z2 / (4 * n)) ** 0.5 / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)


def replies(loaded, form: Form) -> tuple[list[str], int]:
    """Return the replies to all turns of a form, and the tokens that the cache holds in the end."""
    talk = Session(loaded, max_tokens=LONGEST)
    said = ["".join(talk.ask(turn)).strip() for turn in form.turns]
    return said, len(talk.tokens)


def ask(loaded, forms: Sequence[Form]) -> list[dict]:
    """Return a row for every form."""
    rows = []
    for form in forms:
        said, tokens = replies(loaded, form)
        rows.append(
            {
                "kind": form.kind,
                "kept_back": form.kept_back,
                "turns": form.turns,
                "reply": said[-1],
                "tokens": tokens,
                "right": form.right(said[-1]),
            }
        )
    return rows


def shares(rows: list[dict]) -> dict[str, list]:
    """Return [right, all, low, high] for each kind, for all, and for each part where forms are kept back."""
    groups: dict[str, list[bool]] = {"all": [], "worded as in training": [], "kept back": []}
    apart = any(row["kept_back"] for row in rows)
    for row in rows:
        part = "kept back" if row["kept_back"] else "worded as in training"
        for name in ("all", *([part] if apart else []), row["kind"]):
            groups.setdefault(name, []).append(row["right"])
    return {
        name: [sum(r), len(r), *(round(x, 3) for x in wilson(sum(r), len(r)))]
        for name, r in groups.items()
        if r
    }


def merged(rows: dict[str, list[dict]]) -> list[dict]:
    """One row a form, with the reply of each cache and whether it is right."""
    out = []
    for each in zip(*rows.values(), strict=True):
        row = {key: each[0][key] for key in ("kind", "kept_back", "turns")}
        told = {kv: [r["reply"], r["right"], r["tokens"]] for kv, r in zip(rows, each, strict=True)}
        same = all(said == [*told.values()][0] for said in told.values())
        out.append(row | ({"all": [*told.values()][0]} if same else told))
    return out


def table(found: dict[str, dict[str, list]]) -> str:
    """Return a table in Markdown: a row a group, a column a cache."""
    lines = ["| forms | n | " + " | ".join(found) + " |", "|---|---|" + "---|" * len(found)]
    for name, (_, n, _, _) in next(iter(found.values())).items():
        cells = [
            f"{right / n:.1%} ({low:.0%} to {high:.0%})"
            for right, n, low, high in (each[name] for each in found.values())
        ]
        lines.append(f"| {name} | {n} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="tiny-chat")
    parser.add_argument("--kv", default="fp16,int4", help="presets by commas")
    parser.add_argument("--forms", type=Path, default=FILE, help="another list of the same format")
    parser.add_argument(
        "--out", help="a JSON file with every reply, whether it is right, and the tokens held"
    )
    parser.add_argument("--wrong", action="store_true", help="print what is answered wrong")
    args = parser.parse_args()
    forms, found, rows = read(args.forms), {}, {}
    for kv in args.kv.split(","):
        rows[kv] = ask(load(args.model, kv), forms)
        found[kv] = shares(rows[kv])
        if args.wrong:
            for row in rows[kv]:
                if not row["right"]:
                    print(f"{kv}: {row['kind']}: {' >> '.join(row['turns'])}\n    {row['reply']}")
    print(table(found))
    kinds = list(rows)
    same = sum(
        a["reply"] == b["reply"] for a, b in zip(rows[kinds[0]], rows[kinds[-1]], strict=True)
    )
    print(f"{same} of {len(forms)} last replies are the same under {kinds[0]} and {kinds[-1]}")
    if args.out:
        data = {"model": args.model, "shares": found, "same": same, "rows": merged(rows)}
        Path(args.out).write_text(json.dumps(data) + "\n")


if __name__ == "__main__":
    main()
