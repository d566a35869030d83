"""Compare presets on plain and planted models, side by side: `python -m experiments.plants --out FILE`.

Every model reads the same texts, four of stories, which the embedded models know, and four kinds of the
evaluation corpus, which they do not. Windows are the same, and all are calibrated on one text that shares nothing
with these. A cell is the KL divergence from the model's own full precision, the mean over texts of stories and of
the corpus. `mlxkv.models.catalog.plant` says what each plant does and which methods are invariant under it.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.progress import Progress

from experiments.options import Parser, at_least, check_out, made_on, words, write
from mlxkv import console
from mlxkv.errors import UserError
from mlxkv.eval.arms import BASELINE, Arms
from mlxkv.eval.tasks import divergence
from mlxkv.eval.tasks.divergence import LEGS
from mlxkv.formats.calibration.artifact import Calibration
from mlxkv.formats.names import parse_kv
from mlxkv.models import load
from mlxkv.models.calibration import measure
from mlxkv.models.catalog.aliases import EMBEDDED
from mlxkv.texts import corpus
from mlxkv.texts.sources import story_tokens

PRESETS = "int4,int3,int2,oscar-int2,kivi-int2,kvarn-int2,hadamard-int2,naive-int2"
STORIES = ("stories-1", "stories-2", "stories-3", "stories-4")  # names and seeds
CORPUS = ("prose", "dialogue", "code", "tables")
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
    loaded = load(model)
    made = calibration(loaded)
    arms = Arms(loaded, presets, windows=(64, 64), calibrations=dict.fromkeys(presets, made))
    out = {}
    for name, tokens in texts(loaded, context + decode + 1).items():
        found = divergence.measure(arms, list(presets), tokens, context, progress)
        out[name] = {p: {leg: found[p]["legs"][leg]["kl"]["mean"] for leg in LEGS} for p in presets}
    return out


def table(found: dict[str, dict], leg: str) -> list[list[str]]:
    """Return a row per preset: a cell per model."""
    presets = list(next(iter(next(iter(found.values())).values())))
    rows = []
    for preset in presets:
        cells = []
        for by_text in found.values():
            means = (mean(by_text[t][preset][leg] for t in kind) for kind in (STORIES, CORPUS))
            cells.append(" / ".join(f"{x:.2g}" for x in means))
        rows.append([preset, *cells])
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("plants", __doc__)
    add = parser.add_argument
    add(
        "--models",
        type=words,
        default=tuple(EMBEDDED),
        help="by commas; default: the embedded ones",
    )
    add("--kv", type=words, default=words(PRESETS), help="cache presets, by commas")
    add("--context", default="1024", help="tokens of the prompt")
    add("--decode", type=int, default=64, help="tokens decoded one by one after the context")
    add("--out", type=Path, help="write the document to this file")
    args = parser.parse_args(arguments)
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
    for leg in LEGS:
        title = f"KL of the {leg}, stories / corpus, {context} tokens and {args.decode} decoded"
        console.print_table(["preset", *found], table(found, leg), title)
    document = {"context": context, "decode": args.decode, "windows": [64, 64], "kl": found}
    write(document | made_on(start), args.out)


if __name__ == "__main__":
    console.run_tool(main)
