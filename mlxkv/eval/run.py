"""Run `mlxkv eval`: check the options, compute what is missing, write and print the report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from mlxkv import console, startup
from mlxkv.corpora import sources
from mlxkv.errors import UserError
from mlxkv.eval import divergence, engine, report, retrieval
from mlxkv.eval.arms import Arms
from mlxkv.eval.engine import Part, TaskOptions
from mlxkv.eval.intervals import LEAST
from mlxkv.eval.rows import Rows
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import parse_kv, requested
from mlxkv.loading.agreement import choose
from mlxkv.loading.load import Loaded, load
from mlxkv.machine import machine, versions
from mlxkv.metal import gpu
from mlxkv.metal.launch import device_type

TASKS = ("divergence", "retrieval")
SHORTEST = 512  # tokens that hold a few facts, a question and its answer, and a page to quantize
QUESTIONS, QUESTIONS_CPU = 32, 8  # of each kind


@dataclass(frozen=True)
class Level:
    """Defaults of a run. decode: tokens decoded one by one after each context and text."""

    kv: str
    context: str
    tasks: str
    samples: int
    decode: int


QUICK = Level("int4", "1k", "divergence", LEAST, 32)
THOROUGH = Level("int8,int4,fill-4,fill-3,fill-2.25", "2k", "divergence,retrieval", 8, 64)


def run_eval(command: SimpleNamespace) -> int:
    """Run the command with the options of `command.evaluate`, by their names there.

    Options are checked before the model is loaded. Returns the exit code.
    """
    level = THOROUGH if command.thorough else QUICK
    names = dict.fromkeys(name.strip() for name in (command.kv or level.kv).split(","))
    out = command.out and console.user_path(command.out, "--out")
    folder = out or Path("mlxkv-eval") / Path(command.model).name
    data = measured(command, {name: requested(name) for name in names}, level, folder)
    report.write_page(data, folder)
    report.show(data)
    console.note(f"{data['seconds']:.0f} s; report: {folder / 'report.md'}")
    if command.json:
        console.print_json(report.brief(data))
    return 0


def measured(
    command: SimpleNamespace,
    kv: Mapping[str, CacheConfig | str],
    level: Level,
    folder: Path | None,
) -> dict:
    """Return `report.assemble` of a run. command: its options. kv: the caches, by name. folder: of the results, which
    a later run continues; None keeps them in memory and shows nothing. Raises UserError."""
    options, windows = _options(command, level), _windows(command.windows)
    tasks = _tasks(command.tasks or level.tasks)
    start, loaded = time.perf_counter(), command.model
    if any(isinstance(cache, str) for cache in kv.values()):
        startup.whole_float32()  # that is what a share is measured in
    if not isinstance(loaded, Loaded):
        loaded = load(
            loaded,
            "fp16",
            dtype=command.dtype,
            calibration=command.calibration,
            adapter_path=command.adapter_path,
        )
    configs: dict[str, CacheConfig] = {}
    chosen: dict[str, str] = {}
    for name, cache in kv.items():
        if isinstance(cache, str):
            choice = choose(loaded, cache)
            chosen[name] = choice.line
            if folder is not None:
                console.note(choice.line)
            cache = parse_kv(choice.preset)
        configs[name] = cache
    arms = Arms(loaded, configs, windows)
    parts = parts_of(arms, tasks, options)
    calibrated = [name for name, config in arms.configs.items() if config.calibrated]
    if calibrated:  # make a calibration for all of them, before the first result names one
        with arms.attached(calibrated[0]):
            pass
    rows = Rows(folder and folder / "rows.jsonl")
    if folder is not None:
        console.note(
            f"{cost(parts, arms)}; results go to {folder}: after Ctrl-C, the same command continues"
        )
    results = engine.computed(arms, parts, rows)
    data = report.assemble(arms, options, results, windows)
    if command.adapter_path is not None:
        data["model"] += f" with {Path(command.adapter_path).name}"
    data |= {"machine": machine() | gpu.device(), "versions": versions(), "chosen": chosen}
    return data | {"seconds": round(time.perf_counter() - start, 1)}


def cost(parts: list[Part], arms: Arms) -> str:
    """Return a line about the run's work: texts and documents, times the caches."""
    texts = [part for part in parts if part.task == "divergence"]
    documents = [part for part in parts if part.task == "retrieval"]
    clauses = []
    if texts:
        clauses.append(
            f"{len(texts)} text{'s' * (len(texts) > 1)} of {sum(p.steps for p in texts)} tokens in all"
        )
    if documents:
        tokens = sum(part.asks["context"] for part in documents)
        clauses.append(
            f"{len(documents)} document{'s' * (len(documents) > 1)} of {tokens} tokens in all"
        )
    hint = f"; --samples {LEAST} reads less" if max(len(texts), len(documents)) > LEAST else ""
    return f"reading {' and '.join(clauses)}, with {len(arms.names)} caches{hint}"


def parts_of(arms: Arms, tasks: tuple[str, ...], options: TaskOptions) -> list[Part]:
    """Return the parts to compute, in the order of TASKS. Raises UserError."""
    loaded, longest = arms.loaded, max(options.contexts)
    if loaded.context and longest > loaded.context:
        raise UserError(
            f"[--context] longer than {loaded.name} was made for; got {longest}; "
            f"choose {loaded.context} or less"
        )
    parts: list[Part] = []
    if "divergence" in tasks:
        parts += divergence.parts(arms, options)
    if "retrieval" in tasks:
        parts += retrieval.parts(arms, options)
    return parts


def _options(command: SimpleNamespace, level: Level) -> TaskOptions:
    contexts = (command.context or level.context).split(",")
    lengths = [console.parse_tokens(text, "--context") for text in contexts]
    if min(lengths) < SHORTEST:
        raise UserError(f"[--context] must be at least {SHORTEST} tokens; got {min(lengths)}")
    samples = level.samples if command.samples is None else command.samples
    if samples < 1:
        raise UserError(f"[--samples] must be at least 1; got {samples}; choose a larger one")
    texts = tuple(console.user_path(name, "--text") for name in command.text)
    sources.check_sources(texts)
    return TaskOptions(
        contexts=tuple(dict.fromkeys(lengths)),
        decode=level.decode,
        questions=QUESTIONS_CPU if device_type() == "cpu" else QUESTIONS,
        texts=texts,
        samples=samples,
    )


def _tasks(text: str) -> tuple[str, ...]:
    tasks = tuple(dict.fromkeys(task.strip() for task in text.split(",")))
    for task in tasks:
        if task not in TASKS:
            raise UserError(f"[--tasks] unknown task; got {task!r}; choose from {', '.join(TASKS)}")
    return tasks


def _windows(text: str) -> tuple[int, int] | None:
    """'64,64' -> (sink, recent); 'own' -> None."""
    if text.strip() == "own":
        return None
    numbers = [part.strip() for part in text.split(",")]
    if len(numbers) != 2 or not all(part.isdigit() for part in numbers):
        raise UserError(
            f"[--windows] not two numbers; got {text!r}; write SINK,RECENT such as 64,64, or own"
        )
    return int(numbers[0]), int(numbers[1])
