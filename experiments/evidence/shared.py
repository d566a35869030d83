"""Table of runs that users share: `python -m experiments.evidence.shared`.

Reads docs/results/shared/*.json, which `make evidence MODEL=... ARGS=--share` wrote, and writes
docs/results/pretrained.md. A file holds the model's name, machine, versions, and for each preset bits, mean KL
and answers with their intervals: no text, no path, no user name.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from experiments.evidence import table
from experiments.evidence.corpus import kind
from experiments.evidence.rows import Row
from experiments.evidence.table import Block, Entry
from experiments.options import Parser
from mlxkv import console, scrub
from mlxkv.errors import UserError
from mlxkv.eval import intervals
from mlxkv.eval.arms import BASELINE
from mlxkv.eval.intervals import Interval
from mlxkv.formats.names import parse_kv

FORMAT, VERSION, KIND = "mlxkv-evidence", 1, "evidence"
FOLDER = Path(__file__).parents[2] / "docs" / "results" / "shared"
PACKAGES = ("mlxkv", "mlx", "mlx-lm")
AGAINST = "int2"
HEAD = """\
# Pretrained models

For whoever asks what holds on a model that people use, and for whoever can run one.

{said}

Written by `python -m experiments.evidence.shared` from the files in [shared/](shared), one for each run. A file
holds no text, path or user name. To add yours, attach what this writes to an issue (nobody has timed it on a
Mac; the run says how long the rest takes after each cache):

    make evidence MODEL=qwen3-4b ARGS=--share
"""
NOTES = """\
KL: nats against the model's own full precision, a mean over texts, with its interval of 95 % from resampling
texts. Of `int2`: ratio of means on the same texts; in bold where its interval is on one side of 1. Right:
questions with every value right, with the wider of Wilson's interval and that of resampled documents. Windows:
first and last 64 tokens exact for all presets."""


def document(
    block: Block, found: Sequence[Row], name: str, made: dict, decode: int, length: int
) -> dict:
    """Return what is shared of one run, for `scrub.put`. found: its rows. length: tokens of a document of questions."""
    machine = made["machine"]
    some = next(row for row in found if "error" not in row)
    kinds: dict[str, int] = {}
    for text in block.texts:
        kinds[kind(text)] = kinds.get(kind(text), 0) + 1
    asked = max((len(one.right) for one in block.entries.values()), default=0)
    return {
        "format": FORMAT,
        "version": VERSION,
        "date": time.strftime("%Y-%m-%d"),
        "model": scrub.clean(name),
        "weights": some["fingerprint"],
        "dtype": some["dtype"],
        "machine": {
            "chip": scrub.clean(machine.get("device") or machine["chip"]),
            "backend": machine["backend"],
            "memory_bytes": machine["memory_bytes"],
            "system": scrub.public_system(machine["system"]),
            "python": machine["python"],
        },
        "versions": {one: made["versions"].get(one) for one in PACKAGES},
        "windows": block.windows,
        "context": block.context,
        "decode": decode,
        "texts": kinds,
        "documents": asked,
        "document": length if asked else 0,
        "presets": [_preset(block, one) for one in block.entries.values()],
    }


def _preset(block: Block, one: Entry) -> dict:
    """kl, ratio: [value, low, high], limits None where there are too few texts. right: [right, asked, low, high]."""
    whole = bool(block.texts) and not set(block.texts) - set(one.kl)
    out: dict = {"preset": one.name, "bits": one.bits, "in_all": one.in_all}
    if not whole:
        return {"preset": one.name, "failed": True}
    out["kl"] = _numbers(intervals.mean(block.values(one.name)))
    against = block.entries.get(AGAINST)
    if one.name not in (AGAINST, BASELINE) and against and not set(block.texts) - set(against.kl):
        out["ratio"] = _numbers(block.ratio(one.name, AGAINST))
    if one.right:
        answers = list(one.right.values())
        share = intervals.found(answers)
        counts = sum(map(sum, answers)), sum(map(len, answers))
        out["right"] = [*counts, share.low, share.high]
    return out


def _numbers(found: Interval) -> list[float | None]:
    return [x if x is None else float(f"{x:.6g}") for x in (found.value, found.low, found.high)]


def read(file: Path) -> dict:
    """Read and check a shared file. Raises UserError."""
    return scrub.read_json(file, "evidence.shared", FORMAT, VERSION, _wrong)


def _wrong(data: dict) -> str | None:
    """Say what is wrong with the contents of a file, or None."""
    texts = [data["model"], data["dtype"], data["date"], data["windows"]]
    texts += [data["machine"][one] for one in ("chip", "backend", "system", "python")]
    if not all(isinstance(text, str) and len(text) < 200 for text in texts):
        return "a name that is no short text"
    counts = [data["context"], data["decode"], data["documents"], data["machine"]["memory_bytes"]]
    counts += data["texts"].values()
    if not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in counts):
        return "a count that is no whole number"
    if not data["presets"]:
        return "no preset"
    for one in data["presets"]:
        parse_kv(one["preset"])
        if one.get("failed"):
            continue
        numbers = [
            one["bits"],
            one["in_all"],
            *one["kl"],
            *one.get("ratio", []),
            *one.get("right", []),
        ]
        if not all(x is None or (isinstance(x, (int, float)) and 0 <= x < 1e9) for x in numbers):
            return f"numbers of {one['preset']} out of range"
        if (
            len(one["kl"]) != 3
            or len(one.get("ratio", "123")) != 3
            or len(one.get("right", "1234")) != 4
        ):
            return f"limits of {one['preset']} missing"
    return None


def markdown(found: Sequence[dict]) -> str:
    """Return the page of the files `found`."""
    if not found:
        return HEAD.format(said="**No pretrained model has been run yet**, on any machine.")
    models = list(dict.fromkeys(data["model"] for data in found))
    runs = "run" if len(found) == 1 else "runs"
    lines = [
        HEAD.format(
            said=f"{len(found)} {runs} of {len(models)} models, by users of mlxkv on their machines."
        )
    ]
    for data in sorted(found, key=lambda one: (one["model"].lower(), one["date"])):
        lines += [*_section(data), ""]
    return "\n".join([*lines, NOTES]) + "\n"


def _section(data: dict) -> list[str]:
    machine, versions = data["machine"], data["versions"]
    texts = ", ".join(f"{count} {name}" for name, count in data["texts"].items())
    packages = ", ".join(f"{name} {versions.get(name)}" for name in PACKAGES)
    where = f"{machine['chip']}, {machine['memory_bytes'] / 2**30:.0f} GB, {machine['backend']}, {machine['system']}"
    cells = [
        f"{where}; {packages}; {data['date']}; {data['dtype']}.",
        f"Texts of {data['context']} and {data['decode']} tokens: {texts}; {data['documents']} documents.",
    ]
    lines = [f"## {scrub.plain_cell(data['model'])}", ""]
    lines += [scrub.plain_cell(" ".join(cells)), ""]
    heads = ["preset", "bits", "in all", "mean KL [95 %]", f"of {AGAINST}", "right"]
    lines += [scrub.table_line(heads), scrub.table_line(["---"] * len(heads))]
    for one in data["presets"]:
        if one.get("failed"):
            lines.append(scrub.table_line([one["preset"], "failed", "", "", "", ""]))
            continue
        ratio = table.ratio(Interval(*one["ratio"])) if "ratio" in one else ""
        if ratio and not Interval(*one["ratio"]).holds(1.0):
            ratio = f"**{ratio}**"
        right = ""
        if "right" in one:
            count, asked, low, high = one["right"]
            right = f"{count}/{asked}" + (
                "" if low is None else f" [{100 * low:.0f}, {100 * high:.0f}] %"
            )
        kl = table.with_limits(Interval(*one["kl"]))
        cells = [one["preset"], f"{one['bits']:.2f}", f"{one['in_all']:.2f}", kl]
        lines.append(f"{scrub.table_line(cells)} {ratio} | {right} |")
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("evidence.shared", __doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of shared files")
    parser.add_argument(
        "--out", type=Path, help="the page; default: pretrained.md beside the folder"
    )
    args = parser.parse_args(arguments)
    found, bad = scrub.read_folder(str(args.folder), "--folder", read)
    if bad:
        raise UserError(
            f"[evidence.shared] {bad} files cannot be used; got {args.folder}; see above"
        )
    out = args.out or args.folder.parent / "pretrained.md"
    try:
        out.write_text(markdown(found), encoding="utf-8")
    except OSError as error:
        raise UserError(f"[--out] cannot write; got {out}: {error.strerror}") from None
    console.note(str(out))


if __name__ == "__main__":
    console.run_tool(main)
