"""Compare presets on plain and planted models, side by side: `python -m experiments.plants --out FILE`.

Every model reads the same texts, four of stories, which the embedded models know, and four kinds of the
evaluation corpus, which they do not. Windows are the same, and all are calibrated on one text that shares nothing
with these. A cell is the KL divergence from the model's own full precision, the mean over texts of stories and of
the corpus; the last tables divide by the plain model. `mlxkv.models.catalog.weights.plant` says what each plant does
and which methods are invariant under it. `--read FILE...` shows runs of single models as one table.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import mean

import mlx.core as mx
from rich.console import Console
from rich.progress import Progress

from experiments.options import Parser, at_least, check_out, made_on, words, write
from mlxkv import console
from mlxkv.errors import UserError
from mlxkv.eval import intervals
from mlxkv.eval.arms import BASELINE, Arms
from mlxkv.eval.tasks import divergence, retrieval
from mlxkv.eval.tasks.divergence import LEGS
from mlxkv.eval.tasks.part import TaskOptions
from mlxkv.formats.calibration.artifact import Calibration
from mlxkv.formats.names import parse_kv
from mlxkv.models import load
from mlxkv.models.calibration import measure
from mlxkv.models.catalog.aliases import EMBEDDED, resolve
from mlxkv.texts import corpus
from mlxkv.texts.sources import story_tokens

PRESETS = "int4,int3,int2,oscar-int2,kivi-int2,kvarn-int2,hadamard-int2,naive-int2"
STORIES = ("stories-1", "stories-2", "stories-3", "stories-4")  # names and seeds
CORPUS = ("prose", "dialogue", "code", "tables")
REFERENCE = "int2"  # with which the others are compared on each model
CALIBRATION = 4096  # tokens, half stories, half corpus


def texts(loaded, count: int) -> dict[str, list[int]]:
    """Return `count` tokens of each evaluation text, by name."""
    out = {seed: story_tokens(loaded, count, seed) for seed in STORIES}
    passages = corpus.passages("evaluation")
    for kind in CORPUS:
        tokens = loaded.tokenizer.encode(passages[kind], add_special_tokens=False)
        if len(tokens) < count:
            raise UserError(
                f"[--context] the corpus has {len(tokens)} tokens of {kind}; got {count} to read; "
                "choose a shorter context"
            )
        out[kind] = tokens[:count]
    return out


def calibration_text(loaded, tokens: int = CALIBRATION) -> list[int]:
    """Return tokens of stories and of the corpus's calibration split, half and half, the same for every model."""
    text = "\n\n".join(corpus.interleaved("calibration"))[: 4 * tokens]
    half = loaded.tokenizer.encode(text, add_special_tokens=False)[: tokens // 2]
    return story_tokens(loaded, tokens - len(half), "calibration") + list(half)


def calibration(loaded) -> Calibration:
    """Calibrate on `calibration_text`; no clip is searched."""
    return measure.calibrate(
        loaded.model,
        calibration_text(loaded),
        text="stories and corpus calibration",
        bos=measure.bos_of(loaded.tokenizer),
    )


def judge(model: str, presets: tuple[str, ...], context: int, decode: int, progress) -> dict:
    """Return {text: {preset: {leg: mean KL}}} of a model."""
    loaded = load(model, "fp16")
    made = calibration(loaded)
    arms = Arms(loaded, presets, windows=(64, 64), calibrations=dict.fromkeys(presets, made))
    out = {}
    for name, tokens in texts(loaded, context + decode + 1).items():
        found = divergence.measure(arms, list(presets), tokens, context, progress)
        out[name] = {p: {leg: found[p]["legs"][leg]["kl"]["mean"] for leg in LEGS} for p in presets}
    return out


def function(model: str, context: int = 1024, questions: int = 32) -> list[str]:
    """Return what a plant does to the function in full precision, beside its name: the KL from the plain model and
    both losses on four stories, and how many single codes it finds in documents of `context` tokens."""
    kl, losses = [], {"plain": [], "planted": []}
    plain, planted = (load(name, "fp16", dtype="float32") for name in (_plain(model), model))
    for seed in STORIES:
        tokens = story_tokens(plain, context + 1, seed)
        base, other = (one.model(mx.array([tokens[:-1]]))[0] for one in (plain, planted))
        found = divergence.compare(base, other, mx.array(tokens[1:]))
        kl.append(found.kl.mean())
        losses["plain"].append(found.nll_base.mean())
        losses["planted"].append(found.nll.mean())
    asked = TaskOptions(contexts=(context,), questions=questions, kinds=("single",), samples=4)
    arms = Arms(planted, [BASELINE])
    parts = {
        f"retrieval-{p.name}": p.run(arms, [BASELINE], _quiet) for p in retrieval.parts(arms, asked)
    }
    right = retrieval.pooled(parts)[f"retrieval-single-{context}"][BASELINE]
    before, after = (f"{mean(losses[key]):.3f}" for key in ("plain", "planted"))
    share = intervals.found(right["documents"])
    sure = f"{share.value:.0%} ({share.low:.0%} to {share.high:.0%} of {right['questions']})"
    return [model, f"{mean(kl):.2g}", f"{before} -> {after}", sure]


def table(found: dict[str, dict], leg: str) -> list[list[str]]:
    """Return a row per preset: a cell per model, the means over stories and over the corpus."""
    rows = []
    for preset in _presets(found):
        cells = []
        for by_text in found.values():
            means = (mean(by_text[t][preset][leg] for t in kind) for kind in (STORIES, CORPUS))
            cells.append(" / ".join(f"{x:.2g}" for x in means))
        rows.append([preset, *cells])
    return rows


def factors(found: dict[str, dict], leg: str) -> tuple[list[str], list[list[str]]]:
    """Return the planted models and a row per preset: mean KL over that of the plain model on the same eight
    texts, with a 95 % interval from resampling texts. A cell is marked where the interval leaves out 1."""
    pairs = {
        model: plain for model in found if (plain := _plain(model)) in found and plain != model
    }
    rows = []
    for preset in _presets(found):
        cells = []
        for model, plain in pairs.items():
            ours, theirs = ([by[t][preset][leg] for t in by] for by in (found[model], found[plain]))
            cells.append(told(ours, theirs))
        rows.append([preset, *cells])
    return list(pairs), rows


def told(ours: list[float], theirs: list[float]) -> str:
    """Return the ratio of two means over the same texts with its interval, marked where that leaves out 1."""
    one = intervals.ratio(ours, theirs)
    if one.low is None:
        return f"{one.value:.2g}"
    mark = " *" if one.low > 1 or one.high < 1 else ""
    return f"{one.value:.2g} ({one.low:.2g} to {one.high:.2g}){mark}"


def shares(found: dict[str, dict], leg: str, reference: str = REFERENCE) -> list[list[str]]:
    """Return a row per preset: its mean KL over that of `reference` on the same texts of the same model."""
    rows = []
    for preset in _presets(found):
        if preset != reference:
            each = (
                [[by[t][p][leg] for t in by] for p in (preset, reference)] for by in found.values()
            )
            rows.append([preset, *(told(ours, theirs) for ours, theirs in each)])
    return rows


def _quiet(steps: int) -> None:
    """Take the progress of a task and show none."""


def _presets(found: dict[str, dict]) -> list[str]:
    return list(next(iter(next(iter(found.values())).values())))


def _plain(model: str) -> str:
    """Return the name of the model without its plant."""
    source = resolve(model)
    same = (n for n, s in EMBEDDED.items() if s.folder == source.folder and not s.planted)
    return next(same, model.rpartition("+")[0] if source.planted else model)


def show(found: dict[str, dict], title: str, reference: str = REFERENCE) -> None:
    for leg in LEGS:
        lines = markdown(["preset", *found], table(found, leg))
        print(f"KL of the {leg}, stories / corpus, {title}\n\n{lines}\n")
    for leg in LEGS if reference in _presets(found) else ():
        lines = markdown(["preset", *found], shares(found, leg, reference))
        print(f"KL of the {leg} over {reference}'s, eight texts, {title}\n\n{lines}\n")
    for leg in LEGS:
        planted, rows = factors(found, leg)
        if planted:
            lines = markdown(["preset", *planted], rows)
            print(f"KL of the {leg} over the plain model's, eight texts, {title}\n\n{lines}\n")


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def read(files: list[Path]) -> dict:
    """Return the documents of earlier runs as one. Raises UserError for runs of other lengths."""
    documents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    if len({(one["context"], one["decode"]) for one in documents}) > 1:
        raise UserError("[--read] the documents have other lengths; got several; name files of one")
    return documents[0] | {"kl": {m: kl for one in documents for m, kl in one["kl"].items()}}


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("plants", __doc__)
    add = parser.add_argument
    known = tuple(EMBEDDED)
    add("--models", type=words, default=known, help="by commas; default: the embedded ones")
    add("--kv", type=words, default=words(PRESETS), help="cache presets, by commas")
    add("--context", default="768", help="tokens of the prompt")
    add("--decode", type=int, default=32, help="tokens decoded one by one after the context")
    add("--out", type=Path, help="write the document to this file")
    add("--read", type=Path, nargs="+", help="show the documents of earlier runs, measure nothing")
    add("--over", default=REFERENCE, help="the preset that others are compared with")
    add("--function", action="store_true", help="show what each plant does in full precision")
    args = parser.parse_args(arguments)
    if args.function:
        rows = [function(model) for model in args.models if resolve(model).planted]
        print(markdown(["model", "KL from plain", "loss", "single codes found"], rows))
        return
    if args.read:
        document = read(args.read)
        show(
            document["kl"],
            f"{document['context']} tokens and {document['decode']} decoded",
            args.over,
        )
        return
    context = console.parse_tokens(args.context, "--context")
    at_least("--context", context, 2)
    at_least("--decode", args.decode, 2)
    check_out(args.out)
    for name in args.kv:
        parse_kv(name)
    names, start = [name for name in args.kv if name != BASELINE], time.perf_counter()
    found = {}
    with Progress(console=Console(stderr=True), transient=True) as bars:
        for model in args.models:
            bar = bars.add_task(model, total=None)
            found[model] = judge(
                model, tuple(names), context, args.decode, lambda n, bar=bar: bars.advance(bar, n)
            )
    show(found, f"{context} tokens and {args.decode} decoded", args.over)
    document = {"context": context, "decode": args.decode, "windows": [64, 64], "kl": found}
    write(document | made_on(start), args.out)


if __name__ == "__main__":
    console.run_tool(main)
