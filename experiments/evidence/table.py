"""Turn rows into what a table says: means over texts with intervals, what is told apart, answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from experiments.evidence.corpus import QUESTIONS, kind
from experiments.evidence.measure import KL, RETRIEVAL
from experiments.evidence.rows import Row
from mlxkv.errors import UserError
from mlxkv.eval import intervals
from mlxkv.eval.arms import BASELINE
from mlxkv.eval.intervals import Interval

TIERS = ((2.55, "2 bits"), (3.55, "3 bits"), (4.55, "4 bits"))  # most bits per value in pages


@dataclass
class Entry:
    """A preset. kl: by text. right: by document, whether each question is answered rightly. error: of a
    text that failed, the first. missing: texts that others have and it has not."""

    name: str
    bits: float
    in_all: float
    kl: dict[str, float] = field(default_factory=dict)
    top1: dict[str, float] = field(default_factory=dict)
    nll: dict[str, float] = field(default_factory=dict)
    right: dict[str, list[bool]] = field(default_factory=dict)
    parts: dict[str, dict[str, list[bool]]] = field(default_factory=dict)
    error: str = ""
    missing: int = 0


@dataclass
class Block:
    """One model, kind of windows and context, with its presets by bits, best first."""

    model: str
    windows: str
    context: int
    split: str
    entries: dict[str, Entry]
    texts: list[str]

    def whole(self) -> list[Entry]:
        """Return the presets whose KL is known of every text, without full precision."""
        found = (one for one in self.entries.values() if one.name != BASELINE)
        return [one for one in found if self.texts and not set(self.texts) - set(one.kl)]

    def values(self, name: str, texts: Sequence[str] | None = None) -> list[float]:
        return [self.entries[name].kl[text] for text in (texts or self.texts)]

    def ratio(self, ours: str, theirs: str) -> Interval:
        return intervals.ratio(self.values(ours), self.values(theirs))

    def lower(self, ours: str, theirs: str) -> int:
        """Return on how many texts `ours` has the lower KL."""
        pairs = zip(self.values(ours), self.values(theirs), strict=True)
        return sum(a < b for a, b in pairs)

    def letters(self, names: Sequence[str]) -> dict[str, str]:
        found = {name: self.values(name) for name in names}
        return intervals.letters(names, intervals.apart(found))

    def kinds(self) -> dict[str, list[str]]:
        out: dict[str, list[str]] = {}
        for text in self.texts:
            out.setdefault(kind(text), []).append(text)
        return out


def blocks(rows: Sequence[Row], split: str) -> list[Block]:
    """Return a block for each model, windows and context that has KL, in the order of the rows."""
    found: dict[tuple, Block] = {}
    documents: dict[tuple, list[Row]] = {}
    for row in rows:
        if row["task"] == RETRIEVAL:
            documents.setdefault((row["model"], row["windows"]), []).append(row)
        elif row["task"] == KL and row["split"] == split:
            where = row["model"], row["windows"], row["context"]
            block = found.setdefault(where, Block(*where, split, {}, []))
            _take(block, row)
    for block in found.values():
        for row in documents.get((block.model, block.windows), []):
            _take(block, row)
        seen = [one for one in block.entries.values() if one.kl]
        block.texts = sorted(set().union(*(one.kl for one in seen))) if seen else []
        for one in block.entries.values():
            one.missing = len(set(block.texts) - set(one.kl))
        order = sorted(block.entries.values(), key=lambda one: (-one.bits, _mean(one)))
        block.entries = {one.name: one for one in order}
    return list(found.values())


def _take(block: Block, row: Row) -> None:
    name, text = row["preset"], row["text"]
    entry = block.entries.setdefault(name, Entry(name, float("nan"), float("nan")))
    if "error" in row:
        entry.error = entry.error or row["error"]
        return
    if row["task"] == KL:
        entry.bits, entry.in_all = row["bits_per_value"], row["bits_with_windows"]
        entry.kl[text], entry.top1[text], entry.nll[text] = row["kl"], row["top1"], row["nll"]
        return
    if entry.bits != entry.bits:
        entry.bits, entry.in_all = row["bits_per_value"], row["bits_with_windows"]
    entry.right[text] = [all(one) for k in QUESTIONS for one in row["right"].get(k, ())]
    for k, answers in row["right"].items():
        entry.parts.setdefault(k, {})[text] = [all(one) for one in answers]


def _mean(entry: Entry) -> float:
    return sum(entry.kl.values()) / len(entry.kl) if entry.kl else float("inf")


def tiers(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return the presets by how many bits they store, best KL first; more than the last tier is left
    out."""
    out: dict[str, list[Entry]] = {}
    least = 0.0
    for most, title in TIERS:
        here = [one for one in entries if least < one.bits <= most]
        if here:
            out[title] = sorted(here, key=_mean)
        least = most
    return out


def across(blocks: Sequence[Block], against: str) -> list[str]:
    """Return a table of mean KL and one of ratios to `against`, a column a block, for the presets that the
    first block has of every text. Raises UserError without blocks."""
    if not blocks:
        raise UserError(
            "[evidence.page] no KL of these texts; got no row; ask for other models or contexts"
        )
    sizes = [
        {block.model for block in blocks},
        {b.context for b in blocks},
        {b.windows for b in blocks},
    ]
    heads = ["preset", "bits", *(_label(block, sizes) for block in blocks)]
    rule = line(["---"] * len(heads))
    means, ratios = [line(heads), rule], [line(heads), rule]
    for one in blocks[0].whole():
        start = [f"`{one.name}`", f"{one.bits:.2f}"]
        cells = [with_limits(mean(block, one)) if has(block, one.name) else "" for block in blocks]
        means.append(line([*start, *cells]))
        if one.name != against:
            cells = [_told(block, one.name, against) for block in blocks]
            ratios.append(line([*start, *cells]))
    return [
        *("Mean KL [95 %], nats:", "", *means, ""),
        *(
            f"Of `{against}`'s on the same texts, in bold where the interval leaves out 1:",
            "",
            *ratios,
        ),
    ]


def _label(block: Block, sizes: Sequence[set]) -> str:
    """Return what tells the block from the others."""
    texts = (block.model, f"{block.context} tokens", windows(block.windows))
    parts = [text for text, found in zip(texts, sizes, strict=True) if len(found) > 1]
    return ", ".join(parts) or block.model


def _told(block: Block, name: str, against: str) -> str:
    if not (has(block, name) and has(block, against)):
        return ""
    found = block.ratio(name, against)
    return ratio(found) if found.holds(1.0) else f"**{ratio(found)}**"


def windows(named: str) -> str:
    return "own windows" if named == "own" else f"windows {named}"


def number(found: Interval | float) -> str:
    """Format with three digits."""
    value = found.value if isinstance(found, Interval) else found
    return f"{value:.3g}".replace("e-0", "e-")


def with_limits(found: Interval) -> str:
    text = number(found)
    return f"{text} [{number(found.low)}, {number(found.high)}]" if found.known else text


def ratio(found: Interval) -> str:
    text = f"{found.value:.2f}" if found.value < 100 else f"{found.value:.3g}"
    if not found.known:
        return text
    limits = (f"{x:.2f}" if x < 100 else f"{x:.3g}" for x in (found.low, found.high))
    return f"{text} [{', '.join(limits)}]"


def line(cells) -> str:
    return "| " + " | ".join(cells) + " |"


def has(block: Block, name: str) -> bool:
    return any(one.name == name for one in block.whole())


def mean(block: Block, one: Entry) -> Interval:
    return intervals.mean(block.values(one.name))
