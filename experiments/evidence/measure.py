"""Measure one model: KL of each text after full precision has read it, and questions about documents."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from experiments.evidence import corpus, rows
from experiments.evidence.corpus import Held
from mlxkv import __version__, console
from mlxkv.errors import MachineError
from mlxkv.eval import feed
from mlxkv.eval.arms import BASELINE, Arms
from mlxkv.eval.questions import prompts
from mlxkv.eval.report.report import bits
from mlxkv.eval.tasks import answers
from mlxkv.eval.tasks.divergence import compare
from mlxkv.formats.calibration import artifact
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import parse_kv
from mlxkv.metal.launch import backend
from mlxkv.models import load
from mlxkv.models.calibration import TOKENS
from mlxkv.models.calibration.measure import WINDOW, bos_of, calibrate
from mlxkv.models.hooks.held import layers_of

KL, RETRIEVAL = "kl", "retrieval"
BLOCK = 64  # tokens whose mean KL a row keeps
TOGETHER = 16  # texts in a batch, on a GPU
HELD_LOGS = 2**29  # bytes of their log probabilities
OWN = "own"  # windows of each preset's own
SCRATCH = (
    "full-precision"  # folder of log probabilities; 34 MB a text of 512 tokens and 16384 entries
)


@dataclass(frozen=True)
class Asked:
    """held: the texts. out: the folder of results, calibrations and full-precision log probabilities.
    decode: tokens after each context. questions: of each kind and document. dtype: of the model, or
    None for its own."""

    held: Held
    out: Path
    decode: int
    questions: int
    dtype: str | None = None


@dataclass(frozen=True)
class Unit:
    """What one row measures: one preset on one text, or on one document of questions."""

    model: str
    windows: str
    preset: str
    task: str
    split: str
    text: str
    context: int
    index: int = 0  # of the document

    @property
    def identity(self) -> dict:
        found = {name: getattr(self, name) for name in rows.IDENTITY}
        return found | {"model": Path(self.model).name}

    def calls(self, asked: Asked) -> int:
        """Return how often the model is called, which is most of the time on a GPU."""
        prompt = -(-self.context // feed.PREFILL)
        if self.task == KL:
            return prompt + -(-asked.decode // feed.DECODE)
        return prompt + asked.questions * (5 + 10)  # one key and four keys, with their questions


def _digest(data: list) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _windowed(name: str, windows: str) -> CacheConfig:
    """Return what a name says, with these windows, unless the name has windows of its own."""
    config = parse_kv(name)
    if windows == OWN or "+sink" in name or "+recent" in name:
        return config
    sink, recent = map(int, windows.split(","))
    return replace(config, sink=sink, recent=recent)


def vocabulary(config: dict) -> int:
    """Return how many entries the vocabulary of a model has, by its config.json."""
    return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 2**18


class Subject:
    """A model with the presets of one kind of windows; made once, then `measure` for each unit."""

    def __init__(self, asked: Asked, model: str, presets: Sequence[str]):
        self.asked = asked
        self.loaded = load(model, BASELINE, dtype=asked.dtype)
        self.presets = list(presets)
        self._arms: dict[str, Arms] = {}
        self._calibration: artifact.Calibration | None = None
        self.tokens = cache(self._tokens)
        self.document = cache(self._document)

    def arms(self, windows: str) -> Arms:
        if windows not in self._arms:
            configs = {name: _windowed(name, windows) for name in self.presets}
            made = Arms(self.loaded, configs)
            needy = [name for name, config in made.configs.items() if config.calibrated]
            if needy and self.asked.held.calibrates:
                made.calibrations = dict.fromkeys(needy, self.calibration())
            self._arms[windows] = made
        return self._arms[windows]

    def calibration(self) -> artifact.Calibration:
        """Return the calibration on the calibration texts; one process makes it, all read it."""
        if self._calibration is None:
            name = f"calibration-{Path(self.loaded.name).name}-{self.loaded.fingerprint[:12]}"
            file = self.asked.out / f"{name}.safetensors"
            with rows.locked(file.with_suffix(".lock")):
                if not file.exists():
                    artifact.write(file, self._calibrated())
            self._calibration = artifact.read(file)
        return self._calibration

    def _calibrated(self) -> artifact.Calibration:
        text = self.asked.held.calibration(self.loaded, TOKENS)
        console.note(f"calibrating {Path(self.loaded.name).name} on {len(text.tokens)} tokens")
        return calibrate(
            self.loaded.model,
            text.tokens,
            text=text.name,
            window=min(WINDOW, self.loaded.context or WINDOW),
            bos=bos_of(self.loaded.tokenizer),
        )

    def _tokens(self, split: str, name: str, count: int) -> list[int]:
        return self.asked.held.tokens(self.loaded, split, name, count)

    def _document(self, index: int, context: int):
        return self.asked.held.document(self.loaded, index, context, self.asked.questions)

    def state(self, unit: Unit) -> str:
        """Return a digest of the model and of what it reads: the same for every preset."""
        of_kl = unit.task == KL
        read = self._text(unit) if of_kl else self.document(unit.index, unit.context).text
        how = self.asked.decode if of_kl else self.asked.questions
        return _digest([self.loaded.fingerprint, str(self.loaded.dtype), backend(), read, how])

    def of(self, unit: Unit) -> str:
        """Return a digest of all that the row of a unit depends on."""
        arms = self.arms(unit.windows)
        used = arms.calibration(unit.preset)
        config = arms.configs[unit.preset].as_dict()
        return _digest([self.state(unit), config, used and used.digest, __version__])

    def _text(self, unit: Unit) -> list[int]:
        return self.tokens(unit.split, unit.text, unit.context + self.asked.decode + 1)

    def read_base(self, unit: Unit) -> None:
        """Write full precision's log probabilities after each decoded token, [decode, vocabulary]
        float32, unless another process has: before a preset is attached."""
        file = self._base(unit)
        if file.exists():
            return
        file.parent.mkdir(exist_ok=True)
        with rows.locked(file.with_suffix(".lock")):
            if file.exists():
                return
            tokens = self._text(unit)
            with self.arms(unit.windows).attached(BASELINE) as loaded:
                cache = feed.prefill(loaded, tokens[: unit.context])
                found = feed.log_probabilities(loaded, cache, tokens[unit.context : -1])
            scratch = file.with_suffix(".tmp.npy")
            np.save(scratch, np.array(found))
            scratch.replace(file)

    def _base(self, unit: Unit) -> Path:
        parts = [
            self.loaded.fingerprint,
            str(self.loaded.dtype),
            backend(),
            unit.context,
            self._text(unit),
        ]
        return self.asked.out / SCRATCH / f"{_digest(parts)}.npy"

    @property
    def together(self) -> int:
        """How many texts are read at once: a GPU waits for the host otherwise."""
        if backend() == "cpu":
            return 1
        each = 4 * self.asked.decode * vocabulary(self.loaded.config)
        return max(1, min(TOGETHER, HELD_LOGS // each))

    def measure(self, units: Sequence[Unit], loaded) -> list[dict]:
        """Return the numbers of each unit: of texts of one context, or of one document. loaded: with the
        units' preset attached."""
        start, first = time.perf_counter(), units[0]
        found = self._kl(units, loaded) if first.task == KL else [self._retrieval(first, loaded)]
        about = {
            "fingerprint": self.loaded.fingerprint,
            "dtype": str(self.loaded.dtype).split(".")[-1],
            **bits(self.arms(first.windows), first.preset, first.context),
        }
        seconds = round((time.perf_counter() - start) / len(units), 2)
        return [about | numbers | {"seconds": seconds} for numbers in found]

    def _kl(self, units: Sequence[Unit], loaded) -> list[dict]:
        first, texts = units[0], [self._text(unit) for unit in units]
        for unit in units:
            if not self._base(unit).exists():
                raise MachineError(f"[evidence] full precision did not read {unit.text}")
        tokens = mx.array(texts)
        cache = feed.prefill(loaded, tokens[:, : first.context])
        held = self.arms(first.windows).stored(first.preset, cache) / len(units)
        logs = feed.log_probabilities(loaded, cache, tokens[:, first.context : -1])
        values = sum(
            s.values(first.context) for s in layers_of(self.loaded.model) if s.kind == "full"
        )
        return [
            self._scored(unit, text, log) | {"kv_bytes": held, "values": values}
            for unit, text, log in zip(units, texts, logs, strict=True)
        ]

    def _scored(self, unit: Unit, text: list[int], logs: mx.array) -> dict:
        base = mx.array(np.load(self._base(unit)))
        scored = compare(base, logs, mx.array(text[unit.context + 1 :]))
        if not np.isfinite(scored.kl).all():
            raise MachineError(f"[evidence] NaN or infinity in the KL of {unit.preset}")
        ends = range(0, len(scored), BLOCK)
        return {
            "tokens": len(scored),
            "kl": float(scored.kl.mean()),
            "kl_p99": float(np.percentile(scored.kl, 99)),
            "kl_blocks": [float(scored.kl[i : i + BLOCK].mean()) for i in ends],
            "top1": float(scored.same.mean()),
            "nll": float(scored.nll.mean()),
            "nll_base": float(scored.nll_base.mean()),
        }

    def _retrieval(self, unit: Unit, loaded) -> dict:
        arms = self.arms(unit.windows)
        document = self.document(unit.index, unit.context)
        begin = prompts.prefix(loaded, document.text)
        right: dict[str, list[list[bool]]] = {}
        logs: dict[str, list[float]] = {}
        held = 0
        for kind in corpus.QUESTIONS:
            for question in document.of(kind):
                prompt = prompts.ask(loaded, document.text, question.question)
                head, rest = prompts.split(prompt, begin)
                cache = arms.prefixes.read(loaded, unit.preset, head)
                held = len(head)
                answer = prompts.answer(loaded, question.answer)
                found, likely = answers.score(
                    loaded, feed.branch(cache), rest, answer, question.values
                )
                right.setdefault(kind, []).append(found)
                logs.setdefault(kind, []).append(sum(sum(likely, [])) / len(sum(likely, [])))
        return {"tokens": held, "right": right, "likelihood": logs}
