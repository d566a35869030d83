"""Measure presets on a pretrained model: `python -m experiments.evidence.pretrained MODEL` (`make evidence MODEL=...`).

MODEL is a name of `mlxkv models` or of the hub, or a folder. Nothing else is needed: the texts come with
mlxkv and with Python (a kind of the corpus each, and Python's documentation). Calibrates on texts that no
evaluation reads, measures KL over twelve texts of seven kinds, asks questions about documents, and writes
OUT/MODEL.md with a picture and all rows. Goes on where it was stopped: give the same command again. After
each preset it says how long the rest takes. --documents 0 leaves out the questions, about half of the time.

--share writes one small file, without texts, paths and user names, of which docs/results/pretrained.md is
made (`python -m experiments.evidence.shared`).
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

from experiments.evidence import corpus, measure, page, rows, shared, work
from experiments.evidence.command import ROWS
from experiments.fixtures import QWEN, TINY
from experiments.options import Parser, at_least, made_on, words
from mlxkv import console, scrub
from mlxkv.errors import UserError
from mlxkv.eval.arms import BASELINE
from mlxkv.formats.names import parse_kv
from mlxkv.texts import sources
from mlxkv.texts.corpus import KINDS, passages

PRESETS = (
    "int4", "fill-2.25", "fill-3", "int2", "int3", "oscar-int2", "kivi-int2", "kvarn-int2",
    "hadamard-int2", "turbo-int2", "naive-int4", "naive-int2", "srft-scaled-int4",
)  # fmt: skip
WINDOWS = "64,64"
MANUALS, HAYSTACKS = (
    6,
    8,
)  # texts of Python's documentation: KL is of the first, questions are in the others
MANUAL = "manual"


@dataclass(frozen=True)
class Bundled(corpus.Held):
    """Texts that come with mlxkv and with the running Python, for pretrained models."""

    folder: Path | None = None

    @property
    def calibrates(self) -> bool:
        return True

    def names(self, split: str) -> list[str]:
        return [*(f"{kind}-1" for kind in KINDS), *(f"{MANUAL}-{i + 1}" for i in range(MANUALS))]

    def tokens(self, loaded, split: str, name: str, count: int) -> list[int]:
        """Return `count` tokens: a kind's passages at the end, so that they are what is decoded, after as
        much of Python's documentation as is needed."""
        place = self.names(split).index(name)
        bos = getattr(loaded.tokenizer, "bos_token_id", None)
        start = [] if bos is None else [bos]
        room = count - len(start)
        own = (
            []
            if place >= len(KINDS)
            else self._encoded(loaded, passages("evaluation")[KINDS[place]])
        )
        own = own[:room]
        before: list[int] = []
        for topic in _stretch(place):
            if len(before) + len(own) >= room:
                break
            before += self._encoded(loaded, topic + sources.BETWEEN)
        found = [*start, *before[: room - len(own)], *own]
        if len(found) < count:
            raise UserError(
                f"[--context] the text {name} has {len(found)} tokens for this model; got {count}; "
                "choose a shorter context"
            )
        return found

    def calibration(self, loaded, count: int) -> sources.Text:
        return sources.calibration_tokens(loaded, count)

    def haystack(self, index: int) -> str:
        first = len(KINDS) + MANUALS
        return sources.BETWEEN.join(_stretch(first + index % HAYSTACKS))

    def document_name(self, index: int) -> str:
        name = f"python-{index % HAYSTACKS + 1}"
        return name if index < HAYSTACKS else f"{name}+{index // HAYSTACKS}"

    def _encoded(self, loaded, text: str) -> list[int]:
        return loaded.tokenizer.encode(text, add_special_tokens=False)


@cache
def _topics() -> list[str]:
    return sources.documentation("evaluation")


def _stretch(place: int) -> Iterator[str]:
    """Yield the topics of Python's documentation that belong to a text, none to two texts."""
    return islice(_topics(), place, None, len(KINDS) + MANUALS + HAYSTACKS)


def main(arguments: list[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    presets = list(dict.fromkeys([BASELINE, *args.kv]))
    for preset in presets:
        parse_kv(preset)
    context = console.parse_tokens(args.context, "--context")
    document = console.parse_tokens(args.document, "--document")
    at_least("--decode", args.decode, 1)
    at_least("--questions", args.questions, 1)
    at_least("--documents", args.documents, 0)
    if args.share is not None and args.model in (TINY, QWEN):
        raise UserError(
            f"[--share] is for pretrained models; got {args.model}, a fixture of the tests"
        )
    name = scrub.public_name(args.model)
    stem = re.sub(r"[^\w.-]+", "-", name)
    out = args.out or Path("runs") / "evidence" / stem
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"[--out] cannot make it; got {out}: {error.strerror}") from None
    held = corpus.Held(None) if args.model in (TINY, QWEN) else Bundled()
    asked = measure.Asked(held, out, args.decode, args.questions, args.dtype)
    asks = [corpus.TEST], [context], args.documents, document
    units = work.units(asked, {args.model: presets}, [WINDOWS], *asks)
    _before(asked, presets, args.documents, context)
    start = time.perf_counter()
    seconds = None if args.minutes is None else 60 * args.minutes
    done = work.run(asked, units, {args.model: presets}, out / ROWS, seconds)
    console.note(f"{done[0]} measured, {done[1]} failed, {done[2]} left")
    made = made_on(start)
    wanted = {rows.key(unit.identity) for unit in units}
    ran = [row for row in rows.current(rows.read([out / ROWS])) if rows.key(row) in wanted]
    blocks = page.write(ran, out / f"{stem}.md", corpus.TEST, "int2", _head(args, name, made))
    if not done[2] and not done[1]:
        shutil.rmtree(out / measure.SCRATCH, ignore_errors=True)
    if args.share is not None:
        data = shared.document(blocks[0], ran, name, made, args.decode, document)
        console.note(f"{scrub.put(data, args.share, shared.KIND)}: attach it to an issue")


def _parser() -> Parser:
    parser = Parser("evidence.pretrained", __doc__)
    add = parser.add_argument
    add("model", help="name of `mlxkv models` or of the hub, or a folder")
    add("--kv", type=words, default=PRESETS, help="presets by commas")
    add("--out", type=Path, help="folder of results; default: runs/evidence/MODEL")
    add("--context", default="2k", help="tokens of each text before the decoded ones")
    add("--decode", type=int, default=256, help="tokens after each context")
    add("--documents", type=int, default=8, help="of questions; 0: none")
    add("--document", default="4k", help="tokens of each")
    add("--questions", type=int, default=8, help="of one key, and of four, about each document")
    add("--dtype", help="float32, float16 or bfloat16; default: the model's")
    add("--minutes", type=float, help="stop after the text that is being read then")
    add("--share", nargs="?", const="", metavar="FILE", help="write a file for an issue")
    return parser


def _before(asked: measure.Asked, presets: list[str], documents: int, context: int) -> None:
    texts = len(asked.held.names(corpus.TEST))
    console.note(
        f"{len(presets)} caches, {texts} texts of {context} and {asked.decode} tokens, {documents} documents; "
        f"results: {asked.out / ROWS}; stop it at any time, the same command goes on"
    )


def _head(args, name: str, made: dict) -> list[str]:
    used, found = made["machine"], made["versions"]
    where = f"{used.get('device') or used['chip']} ({used['backend']}), {scrub.public_system(used['system'])}"
    packages = ", ".join(f"{one} {found[one]}" for one in ("mlxkv", "mlx", "mlx-lm"))
    return [
        f"# Evidence on {name}",
        "",
        f"Measured on {where}, {packages}, Python {used['python']}. The texts come with mlxkv and with that "
        "Python's documentation; calibrations read others.",
        "",
        f"    make evidence MODEL={name}"
        + ("" if tuple(args.kv) == PRESETS else f' ARGS="--kv {",".join(args.kv)}"'),
    ]


if __name__ == "__main__":
    console.run_tool(main)
