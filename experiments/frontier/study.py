"""Run the arms of a study on models and held-out texts: rows in OUT/rows.jsonl, which a second run completes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from experiments.evidence import rows
from experiments.frontier import corpus
from experiments.frontier.arms import Arm, attend
from experiments.frontier.corpus import KL, RETRIEVAL, Held
from experiments.frontier.engine import PAGE, RECENT, SINK, Memory, prefill, read_on
from experiments.frontier.home import Home, calibrated
from experiments.options import Parser, at_least, numbers, words
from mlxkv import console
from mlxkv.eval.questions import prompts
from mlxkv.eval.tasks.answers import spans
from mlxkv.eval.tasks.divergence import compare
from mlxkv.models import Loaded, load

EXACT = Arm("exact")
WINDOWS = "64,64"
LEAST = SINK + RECENT + 2 * PAGE  # tokens of a prompt: fewer have no page to leave out
# What a study measures besides its arms, of (model, prompt, new tokens, maps): a row without a text for each text.
Extra = Callable[[Loaded, Sequence[Memory], list, Home], list[list[dict]]]


def options(name: str, doc: str | None) -> Parser:
    parser = Parser(name, doc)
    parser.add_argument("--models", type=words, required=True, help="folders or names by commas")
    parser.add_argument(
        "--texts", type=Path, help="held-out texts: SPLIT/KIND-N.txt; default: stories"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of rows.jsonl")
    parser.add_argument("--contexts", default="8064", help="tokens of a prompt")
    parser.add_argument("--decode", type=int, default=128, help="tokens after it")
    parser.add_argument("--count", type=int, default=8, help="texts of a context")
    parser.add_argument("--documents", type=int, default=6, help="documents of questions; 0: none")
    parser.add_argument("--document", type=int, default=8064, help="tokens of a document")
    parser.add_argument("--questions", type=int, default=8, help="of each kind and document")
    parser.add_argument("--together", type=int, default=8, help="texts read at once")
    parser.add_argument("--dtype", help="float32, float16 or bfloat16; default: the model's")
    parser.add_argument("--calibrate", type=int, default=16384, help="tokens of calibration")
    parser.add_argument("--only", type=re.compile, help="arms of which this pattern is the name")
    return parser


def run(
    name: str,
    doc: str | None,
    arms: Sequence[Arm],
    arguments: Sequence[str] | None = None,
    extra: Extra | None = None,
) -> None:
    """Run a study as a command. arguments: of its command line, default sys.argv."""
    parser = options(name, doc)
    args = parser.parse_args(arguments)
    at_least("--decode", args.decode, 1)
    at_least("--together", args.together, 1)
    for context in (*numbers(args.contexts, "--contexts"), args.document):
        at_least("tokens of a prompt", context, LEAST)
    at_least("--calibrate", args.calibrate, 256)
    if args.only is not None:
        arms = [arm for arm in arms if args.only.fullmatch(arm.name)]
    args.out.mkdir(parents=True, exist_ok=True)
    for model in args.models:
        _model(args, model, arms, extra)


def named(model: str) -> str:
    """Return the name of a model's folder: NAME of NAME/hub."""
    path = Path(model)
    return path.parent.name if path.name == "hub" else path.name


def _model(args, model: str, arms: Sequence[Arm], extra: Extra | None) -> None:
    held, file = Held(args.texts), args.out / "rows.jsonl"
    done = {rows.key(row) for row in rows.read([file])} if file.exists() else set()
    loaded = load(model, "fp16", dtype=args.dtype)
    home = calibrated(loaded, held.calibration(loaded, args.calibrate), args.calibrate)
    about = {
        "model": named(model),
        "windows": WINDOWS,
        "split": corpus.TEST,
        "dtype": str(loaded.dtype).split(".")[-1],
        "tf32": os.environ.get("MLX_ENABLE_TF32", "1") != "0",  # on NVIDIA GPUs
    }
    first, *others = numbers(args.contexts, "--contexts")
    start = time.perf_counter()

    def known(row: dict) -> bool:
        return rows.key(about | row) in done

    def keep(row: dict) -> None:
        if not known(row):
            rows.append(file, about | row | {"when": time.time()})

    def texts(context: int) -> None:
        names = held.names(corpus.TEST)[: args.count]
        for i in range(0, len(names), args.together):
            _texts(
                args,
                loaded,
                held,
                names[i : i + args.together],
                context,
                arms,
                home,
                extra,
                known,
                keep,
            )
            past = time.perf_counter() - start
            console.note(
                f"{about['model']} {context}: {min(i + args.together, len(names))} texts, {past:.0f} s"
            )

    texts(first)
    for index in range(args.documents):
        where = {"task": RETRIEVAL, "text": held.document_name(index), "context": args.document}
        some = [EXACT, *(arm for arm in arms if arm.ask)]
        asked = [one for one in some if not known(where | {"preset": one.name})]
        if asked:
            document = held.document(loaded, index, args.document, args.questions)
            for arm, right in answers(loaded, document, asked, home).items():
                bits = _bits(arm, home, args.document)
                keep(where | {"preset": arm.name, "right": right} | bits)
    for context in others:
        texts(context)
    console.note(f"{about['model']}: done, {time.perf_counter() - start:.0f} s")


def _texts(args, loaded, held: Held, names, context: int, arms, home, extra, known, keep) -> None:
    """Measure texts in one batch: what `known` does not say is given to `keep`."""

    def row(arm: str, name: str, task: str = KL) -> dict:
        return {"task": task, "preset": arm, "text": name, "context": context}

    asked = [arm for arm in arms if not all(known(row(arm.name, name)) for name in names)]
    if not asked:
        return
    texts = [held.tokens(loaded, corpus.TEST, n, context + args.decode + 1) for n in names]
    prompt = prefill(loaded, [text[:context] for text in texts])
    new = [text[context:-1] for text in texts]
    base = read_on(loaded, prompt, new, attend(EXACT, home))
    for name, found in zip(
        names, extra(loaded, prompt, new, home) if extra else [[]] * len(names), strict=True
    ):
        for one in found:
            keep(row(one["preset"], name, one["task"]) | one)
    for arm in asked:
        logs, bits = (
            read_on(loaded, prompt, new, attend(arm, home)),
            _bits(arm, home, context),
        )
        for i, (name, text) in enumerate(zip(names, texts, strict=True)):
            keep(row(arm.name, name) | bits | compared(base[i], logs[i], text[context + 1 :]))


def _bits(arm: Arm, home: Home, context: int) -> dict:
    """What is read of pages, and of the whole prompt with its exact tokens."""
    pages = (context - SINK - RECENT) // PAGE * PAGE
    bits = arm.bits(home, pages)
    return {
        "bits_per_value": bits,
        "bits_with_windows": (bits * pages + 16 * (context - pages)) / context,
    }


def compared(base: mx.array, logs: mx.array, targets: Sequence[int]) -> dict:
    """Return what a row says of log probabilities [T, vocabulary] beside full precision's."""
    scored = compare(base, logs, mx.array(targets))
    accepted = mx.minimum(mx.exp(base), mx.exp(logs)).sum(-1).mean().item()
    return {
        "kl": float(scored.kl.mean()),
        "kl_p99": float(np.percentile(scored.kl, 99)),
        "top1": float(scored.same.mean()),
        "nll": float(scored.nll.mean()),
        "accepted": accepted,  # share of drafts that sampling would keep, were exact pages the verifier
    }


def answers(loaded, document, arms: Sequence[Arm], home: Home) -> dict[Arm, dict]:
    """Return for each arm and kind which values of its answers are right, all questions in one batch."""
    begin = prompts.prefix(loaded, document.text)
    asked, ends = [], []
    for kind in corpus.QUESTIONS:
        for question in document.of(kind):
            prompt = prompts.ask(loaded, document.text, question.question)
            answer = loaded.tokenizer.encode(
                prompts.answer(loaded, question.answer), add_special_tokens=False
            )
            asked.append([*prompt[len(begin) :], *answer])
            ends.append((kind, answer, spans(loaded, answer, question.values)))
    longest = max(map(len, asked))
    # Attention is causal: nothing before the padding sees it.
    padded = [[*one, *[0] * (longest - len(one))] for one in asked]
    prompt, out = prefill(loaded, [begin]), {}
    for arm in arms:
        likeliest = np.array(mx.argmax(read_on(loaded, prompt, padded, attend(arm, home)), axis=-1))
        right: dict[str, list] = {}
        for line, tokens, (kind, answer, places) in zip(likeliest, asked, ends, strict=True):
            first = len(tokens) - len(answer) - 1
            found = [all(line[first + i] == answer[i] for i in place) for place in places]
            right.setdefault(kind, []).append([bool(x) for x in found])
        out[arm] = right
    return out
