"""Read what was measured of one model: KL by preset, windows and context, answers, and the forms of question."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.evidence.questions import LEAST
from mlxkv.eval import intervals, rows
from mlxkv.eval.arms import BASELINE
from mlxkv.eval.intervals import Interval

OURS, PAPER = "64,64", "paper"  # windows: first and last exact tokens; those of each method's paper
KL, ANSWERS, FORM = "kl", "answers", "form"
KEPT = (
    *rows.IDENTITY, "length", "bits_per_value", "kl", "top1", "nll", "nll_base", "right", "shares", "asked",
    "short", "error",
)  # fmt: skip
DIGITS = 5  # significant, of numbers in kept rows
Place = tuple[str, str, int]  # preset, windows, context


@dataclass
class Cells:
    """The rows of one model. texts: of KL, by place. right: answers, by place and document."""

    name: str
    bits: dict[str, float] = field(default_factory=dict)
    texts: dict[Place, list[rows.Row]] = field(default_factory=dict)
    right: dict[Place, list[list[bool]]] = field(default_factory=dict)
    forms: dict[int, dict[str, float]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)

    @property
    def contexts(self) -> list[int]:
        return sorted({context for _, _, context in self.texts})

    def presets(self, windows: str, context: int) -> list[str]:
        """Return the presets that were measured, full precision first, then by falling bits."""
        names = [p for p, w, c in self.texts if (w, c) == (windows, context)]
        return sorted(names, key=lambda p: (-self.bits[p], p))

    def measured(self, preset: str, context: int, windows: str = OURS) -> bool:
        return (preset, windows, context) in self.texts

    def values(self, preset: str, context: int, windows: str = OURS) -> list[float]:
        """Return the KL of each text, nats, by the names of texts."""
        return [row["kl"] for row in self.texts[preset, windows, context]]

    def kl(self, preset: str, context: int, windows: str = OURS) -> Interval:
        return intervals.mean(self.values(preset, context, windows))

    def likelihood(self, preset: str, context: int, windows: str = OURS) -> Interval:
        """Return the rise of the negative log likelihood a token, nats."""
        texts = self.texts[preset, windows, context]
        return intervals.share([row["nll"] - row["nll_base"] for row in texts])

    def same(self, preset: str, context: int, windows: str = OURS) -> float:
        """Return how often the likeliest next token is that of full precision, in percent."""
        texts = self.texts[preset, windows, context]
        return 100 * sum(row["top1"] for row in texts) / len(texts)

    def answers(self, preset: str, context: int) -> tuple[int, int] | None:
        """Return how many answers are right, and how many were asked; None if none were."""
        documents = self.right.get((preset, OURS, context))
        return (sum(map(sum, documents)), sum(map(len, documents))) if documents else None

    def counted(self, context: int) -> list[str]:
        """Return the forms of question that full precision answers at a context."""
        return [form for form, share in self.forms.get(context, {}).items() if share >= LEAST]


def cells(name: str, measured: Iterable[rows.Row]) -> Cells:
    """Sort rows. Answers to other forms than full precision answers are left out."""
    out, measured = Cells(name), sorted(measured, key=lambda row: row["text"])
    tried: dict[int, list[dict]] = {}
    for row in measured:
        if row["task"] == FORM and "shares" in row:  # of all documents, as older runs kept it
            out.forms[row["context"]] = row["shares"]
        elif row["task"] == FORM and "right" in row:
            tried.setdefault(row["context"], []).append(row["right"])
    out.forms |= {context: shares(documents) for context, documents in tried.items()}
    for row in measured:
        place = row["preset"], row["windows"], row["context"]
        if "bits_per_value" in row:
            out.bits[row["preset"]] = row["bits_per_value"]
        if row["task"] == KL and "kl" in row:
            out.texts.setdefault(place, []).append(row)
            out.lengths[row["context"]] = row["length"]
        elif (
            row["task"] == ANSWERS
            and "right" in row
            and set(row["right"]) == set(out.counted(row["context"]))
        ):
            out.right.setdefault(place, []).append(
                [x for answers in row["right"].values() for x in answers]
            )
    if out.texts:
        out.bits.setdefault(BASELINE, 16.0)
    return out


def shares(documents: Sequence[dict[str, list[bool]]]) -> dict[str, float]:
    """Return the share of right answers by form of question. documents: of each, its answers by form."""
    right = {form: [x for one in documents for x in one[form]] for form in documents[0]}
    return {form: sum(answers) / len(answers) for form, answers in right.items()}


def read(folder: Path) -> dict[str, Cells]:
    """Return what the files NAME.jsonl and NAME.jsonl.gz of a folder hold, by name. Raises UserError."""
    files = sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")])
    return {name: cells(name, rows.read([file])) for file in files for name in [_stem(file)]}


def _stem(file: Path) -> str:
    return file.name.partition(".jsonl")[0]


def machine(folder: Path, name: str) -> dict:
    """Return machine and versions of a run."""
    file = folder / f"{name}.machine.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def keep(file: Path, name: str, folder: Path) -> Path:
    """Write the rows of a run that pages need into a folder: NAME.jsonl.gz, with its machine beside it."""
    kept_rows = [
        {k: _rounded(v) for k, v in row.items() if k in KEPT} | {"model": name}
        for row in sorted(rows.read([file]), key=rows.key)
    ]
    lines = [json.dumps(row, separators=(",", ":")) for row in kept_rows]
    target = folder / f"{name}.jsonl.gz"
    folder.mkdir(parents=True, exist_ok=True)
    target.write_bytes(gzip.compress("\n".join([*lines, ""]).encode(), mtime=0))
    about = machine(file.parent, _stem(file))
    if about:
        text = json.dumps(about, indent=1) + "\n"
        (folder / f"{name}.machine.json").write_text(text, encoding="utf-8")
    return target


def _rounded(value):
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
