"""Keep what `training/natural/measure.sh` wrote: `python -m experiments.evidence.collect ROWS --out FOLDER`.

ROWS holds STAGE/MODEL/rows.jsonl, FOLDER is docs/results. Written are natural/MODEL.jsonl (the stages main and ask),
natural/MODEL-STAGE.jsonl (every other stage with test texts), selection/MODEL.jsonl (the stage chosen) and
selection/tries.json: the mean KL of every try of every method on the selection texts, and what was chosen. A line
holds all texts of a preset, with what tables need, in five digits; `rows.read` takes it apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from experiments.evidence import rows
from experiments.evidence.corpus import SELECTION
from experiments.evidence.measure import KL, RETRIEVAL
from experiments.evidence.selection import CHOSEN
from experiments.options import Parser
from mlxkv import console
from mlxkv.errors import UserError

MAIN, ASK, SELECT, TESTED = "main", "ask", "select", "chosen"
NATURAL, SELECTION_PAGE, TRIES = "natural", "selection", "tries.json"
STUDIES = "frontier"  # have rows of their own kind
NUMBERS = ("bits_per_value", "bits_with_windows", "kl", "top1", "nll", "right", "error")
KEPT = (*rows.IDENTITY, *NUMBERS)


def kept(found: Iterable[rows.Row], model: str) -> list[str]:
    """Return rows as lines, under the name of the model, a line for all texts of a preset."""
    few = (
        {name: _short(row[name]) for name in KEPT if name in row} | {"model": model}
        for row in found
    )
    lines = rows.gathered(few)
    return [json.dumps(line, ensure_ascii=False, separators=(",", ":")) for line in lines]


def _short(value):
    return float(f"{value:.5g}") if isinstance(value, float) else value


def stages(folder: Path, model: str) -> dict[str, list[rows.Row]]:
    """Return the rows of each stage that measured the model; of `ask` the questions alone, whose few decoded tokens
    are no KL to report."""
    found = {}
    for file in sorted(folder.glob(f"*/{model}/rows.jsonl")):
        stage = file.parent.parent.name
        if stage.startswith(STUDIES):
            continue
        some = rows.current(rows.read([file]))
        task = RETRIEVAL if stage == ASK else KL
        found[stage] = [row for row in some if row["task"] == task]
    return found


def tried(folder: Path, model: str) -> dict | None:
    """Return for each method its tries with their mean KL, and the one that was chosen."""
    file = folder / SELECT / model / CHOSEN
    if not file.exists():
        return None
    (methods,) = json.loads(file.read_text(encoding="utf-8")).values()
    return {
        method: {
            "chosen": one["preset"],
            "tries": {name: _short(kl) for name, kl in one["tries"].items()},
        }
        for method, one in methods.items()
    }


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("evidence.collect", __doc__)
    parser.add_argument("rows", type=Path, help="folder of STAGE/MODEL/rows.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    args = parser.parse_args(arguments)
    models = sorted({file.parent.name for file in args.rows.glob("*/*/rows.jsonl")})
    if not models:
        raise UserError(
            f"[evidence.collect] no rows; got {args.rows}; it must hold STAGE/MODEL/rows.jsonl"
        )
    selected = {}
    for model in models:
        by_stage = stages(args.rows, model)
        selected |= {model: found} if (found := tried(args.rows, model)) else {}
        whole = [row for stage in (MAIN, ASK) for row in by_stage.pop(stage, [])]
        by_stage.pop(SELECT, None)
        files = {f"{NATURAL}/{model}": whole, f"{SELECTION_PAGE}/{model}": by_stage.pop(TESTED, [])}
        files |= {f"{NATURAL}/{model}-{stage}": some for stage, some in by_stage.items()}
        for name, some in files.items():
            if some := [row for row in some if row["split"] != SELECTION]:
                _write(args.out / f"{name}.jsonl", "\n".join(kept(some, model)))
                console.note(f"{args.out / name}.jsonl: {len(some)} rows")
    if selected:
        text = json.dumps(selected, indent=0, separators=(",", ":"))
        _write(args.out / SELECTION_PAGE / TRIES, text)


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"[--out] cannot write; got {file}: {error.strerror}") from None


if __name__ == "__main__":
    console.run_tool(main)
