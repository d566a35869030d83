"""Write results as a page: `python -m experiments.evidence.page ROWS.jsonl... --out PAGE.md`.

Per model: presets with bits, mean KL over texts with its interval, the ratio to `--against` on the same
texts, letters of what is not told apart, and answers with Wilson's interval or the wider one of
resampled documents. A picture of KL against bits stands beside the page, and all rows in PAGE.jsonl, unless
a folder PAGE has them.
--across puts models, contexts or windows side by side instead: two tables, KL and its ratio. What stands
above the line "<!-- figures -->" of a page that is there stays.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from experiments.evidence import picture, rows, table
from experiments.evidence.corpus import QUESTIONS, SPLITS, TEST
from experiments.evidence.measure import KL
from experiments.evidence.table import Block, Entry
from experiments.options import Parser, words
from mlxkv import console, plots
from mlxkv.errors import UserError
from mlxkv.eval import intervals
from mlxkv.eval.arms import BASELINE
from mlxkv.eval.intervals import Interval

FIGURES = "<!-- figures -->"
HEADS = ("preset", "bits", "in all", "mean KL [95 %]", "", "of {}", "lower on", "top %", "right")
NOTES = """\
- bits: per stored value in pages, scales included; in all: of the whole cache with its exact tokens.
- KL: nats against full precision on the same tokens, a mean over the decoded tokens of each text; the interval is from
  resampling the {texts} texts (studentised bootstrap of the logarithm).
- of {against}: the ratio of the two means on the same texts, resampled together; in bold where the interval is on one
  side of 1. Lower on: texts on which the KL is the lower of the two.
- Letters: presets of one table that share a letter are not told apart (the interval of their ratio holds 1; 95 % for
  each pair, not for all pairs together).
- right: questions with every value right, of one key and of four keys, with the wider of Wilson's interval and that of
  resampled documents (the questions of a document are alike); ~ where it is not told apart from full precision's."""


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("evidence.page", __doc__)
    parser.add_argument("files", nargs="+", type=Path, help="rows.jsonl of one run or several")
    parser.add_argument("--out", type=Path, required=True, help="the page, .md")
    parser.add_argument("--split", default=TEST, choices=SPLITS)
    parser.add_argument("--against", default="int2", help="the preset of the ratios")
    parser.add_argument("--title", default="Evidence on many texts")
    parser.add_argument("--models", type=words, help="these alone, by commas")
    parser.add_argument("--contexts", help="these alone, by commas: 2k,4k")
    parser.add_argument("--windows", help="these alone: SINK,RECENT or own")
    parser.add_argument("--across", action="store_true", help="one table, a column for each")
    args = parser.parse_args(arguments)
    found = picked(rows.current(rows.read(args.files)), args)
    if args.across:
        blocks = table.blocks(found, args.split)
        tables = "\n".join(["", *table.across(blocks, args.against), ""])
        _replace_figures(args.out, tables, args.title)
        return
    write(found, args.out, args.split, args.against, [f"# {args.title}"])


def picked(found: Sequence[rows.Row], args) -> list[rows.Row]:
    """Return the rows of the models, contexts and windows that were asked for. Questions have a context of
    their own and are not left out for it."""
    contexts = {console.parse_tokens(text, "--contexts") for text in words(args.contexts or "")}
    return [
        row
        for row in found
        if (not args.models or row["model"] in args.models)
        and (not contexts or row["task"] != KL or row["context"] in contexts)
        and (not args.windows or row["windows"] == args.windows)
    ]


def _replace_figures(out: Path, tables: str, title: str) -> None:
    """Write the tables below the mark of a page, whose text above it stays."""
    try:
        old = out.read_text(encoding="utf-8") if out.exists() else f"# {title}\n\n{FIGURES}"
        out.write_text(f"{old.split(FIGURES)[0]}{FIGURES}\n{tables}", encoding="utf-8")
    except OSError as error:
        raise UserError(f"[--out] cannot write; got {out}: {error.strerror}") from None
    console.note(str(out))


def write(
    found: Sequence[rows.Row], out: Path, split: str, against: str, head: Sequence[str]
) -> list[Block]:
    """Write the page `out`, its picture and its rows. head: lines above the figures of a new page.
    Raises UserError."""
    blocks = table.blocks(found, split)
    if not blocks:
        raise UserError(f"[evidence.page] no KL of {split} texts; got {len(found)} rows")
    lines, svg = [FIGURES, ""], out.with_suffix(".svg")
    try:
        if out.exists() and FIGURES in (old := out.read_text(encoding="utf-8")):
            head = [old.split(FIGURES)[0].rstrip()]
        if plots.available():
            svg.write_text(picture.panels(blocks), encoding="utf-8")
            lines += [f"![Mean KL against bits]({svg.name})", ""]
        text = "\n".join([*head, "", *lines, *markdown(blocks, against)])
        out.write_text(text + "\n", encoding="utf-8")
        is_kept = any(out.with_suffix("").glob("*.jsonl"))  # in a folder of that name
        if not is_kept:
            raw = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found)
            out.with_suffix(".jsonl").write_text(raw, encoding="utf-8")
    except OSError as error:
        raise UserError(f"[--out] cannot write; got {out}: {error.strerror}") from None
    console.note(str(out))
    return blocks


def markdown(blocks: Sequence[Block], against: str) -> list[str]:
    lines: list[str] = []
    for block in blocks:
        lines += [f"## {block.model}, {block.context} tokens, {table.windows(block.windows)}", ""]
        lines += [*answer(block), ""]
        whole = block.whole()
        for title, entries in table.tiers(whole).items():
            other = against if table.has(block, against) else entries[0].name
            lines += [f"### At most {title.replace(' bits', '.5 bits')}", ""]
            lines += [*_table(block, entries, other), ""]
        lines += [*by_kind(block, whole), ""]
        lines += [*by_question(block), ""]
        lines += _failures(block)
    texts = " or ".join(dict.fromkeys(str(len(block.texts)) for block in blocks))
    return [*lines, NOTES.format(texts=texts, against=f"`{against}`")]


def answer(block: Block) -> list[str]:
    """Return a sentence per tier: the best method, and by how much the next one is behind."""
    lines = []
    for title, entries in table.tiers(block.whole()).items():
        best, *others = entries
        if not others:
            continue
        second = others[0]
        gap = block.ratio(best.name, second.name)
        told = "not told apart" if gap.holds(1.0) else "told apart"
        lines.append(
            f"- {title}: `{best.name}` has the least mean KL, {table.number(table.mean(block, best))}; "
            f"{table.ratio(gap)} of the next, `{second.name}` ({told}; lower on "
            f"{block.lower(best.name, second.name)} of {len(block.texts)} texts)."
        )
    return lines


def _table(block: Block, entries: Sequence[Entry], against: str) -> list[str]:
    letters = block.letters([one.name for one in entries])
    lines = [
        table.line(head.format(f"`{against}`") for head in HEADS),
        table.line(["---"] * len(HEADS)),
    ]
    for one in entries:
        found = block.ratio(one.name, against)
        text = "1" if one.name == against else table.ratio(found)
        bold = one.name != against and not found.holds(1.0)
        lower = "" if one.name == against else f"{block.lower(one.name, against)}"
        cells = [
            f"`{one.name}`",
            f"{one.bits:.2f}",
            f"{one.in_all:.2f}",
            table.with_limits(table.mean(block, one)),
            letters[one.name],
            f"**{text}**" if bold else text,
            lower and f"{lower} of {len(block.texts)}",
            f"{100 * sum(one.top1.values()) / len(one.top1):.1f}",
            _right(block, one),
        ]
        lines.append(table.line(cells))
    return lines


def by_kind(block: Block, entries: Sequence[Entry]) -> list[str]:
    """Return a table of mean KL by kind of text."""
    kinds = block.kinds()
    if len(kinds) < 2:
        return []
    heads = ["preset", *(f"{kind} ({len(texts)})" for kind, texts in kinds.items())]
    lines = [
        "Mean KL by kind of text (texts):",
        "",
        table.line(heads),
        table.line(["---"] * len(heads)),
    ]
    for one in entries:
        means = [sum(block.values(one.name, t)) / len(t) for t in kinds.values()]
        lines.append(table.line([f"`{one.name}`", *map(table.number, means)]))
    return lines


def by_question(block: Block) -> list[str]:
    """Return a table of right answers by kind of question, with full precision's."""
    some = [one for one in block.entries.values() if one.right]
    if not some:
        return []
    heads = ["preset", "bits", *QUESTIONS, "all", "lost of full precision's"]
    lines = [
        "Questions with every value right:",
        "",
        table.line(heads),
        table.line(["---"] * len(heads)),
    ]
    for one in some:
        cells = [f"`{one.name}`", f"{one.bits:.2f}"]
        cells += [_count(list(one.parts.get(k, {}).values())) for k in QUESTIONS]
        lost = _lost(block, one)
        text = "" if lost is None else f"{100 * lost.value:.1f} points {_limits(lost, 100)}"
        lines.append(table.line([*cells, _count(list(one.right.values())), text]))
    return lines


def _lost(block: Block, one: Entry) -> Interval | None:
    base = block.entries.get(BASELINE)
    if one.name == BASELINE or base is None:
        return None
    shared = [text for text in base.right if text in one.right]
    if not shared:
        return None
    return intervals.lost([one.right[t] for t in shared], [base.right[t] for t in shared])


def _right(block: Block, one: Entry) -> str:
    if not one.right:
        return ""
    lost = _lost(block, one)
    return _count(list(one.right.values())) + (" ~" if lost and lost.holds(0.0) else "")


def _count(documents: list[list[bool]]) -> str:
    if not documents:
        return ""
    found = intervals.found(documents)
    right, asked = sum(map(sum, documents)), sum(map(len, documents))
    return f"{right}/{asked} {_limits(found, 100)} %"


def _limits(found: Interval, scale: float = 1.0) -> str:
    return f"[{scale * found.low:.0f}, {scale * found.high:.0f}]" if found.known else ""


def _failures(block: Block) -> list[str]:
    lines = []
    for one in block.entries.values():
        if one.error or one.missing:
            why = f": {one.error}" if one.error else ""
            lines.append(f"- `{one.name}`: {one.missing} of {len(block.texts)} texts missing{why}")
    return [*lines, ""] if lines else []


if __name__ == "__main__":
    console.run_tool(main)
