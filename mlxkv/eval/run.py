"""`mlxkv eval`: what compressed caches cost in quality, against full precision of the same weights."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from mlxkv import console, doctor
from mlxkv.config import parse_kv
from mlxkv.errors import UserError
from mlxkv.eval import harness, plan, report, retrieval, texts, workers
from mlxkv.eval.document import KINDS
from mlxkv.eval.part import Options
from mlxkv.metal.launch import backend
from mlxkv.models.aliases import EMBEDDED

SHORTEST = 512  # tokens that hold a few facts, a question and its answer, and a page to seal
NEEDLES = ("auto", "worlds", "plain")


QUESTIONS, QUESTIONS_CPU = 16, 6  # of each kind


@dataclass(frozen=True)
class Asked:
    """The options of the command, as they were typed."""

    model: str = "tiny"
    kv: str = "int8,int4,int3,int2"
    context: str = "2k"
    tasks: str = ",".join(plan.TASKS)
    text: list[Path] = field(default_factory=list)
    windows: str = "64,64"
    decode: int = 256
    questions: int | None = None
    kinds: str = ",".join(KINDS)
    tokens: int = 32
    needles: str = "auto"
    dtype: str | None = None
    calibration: str | None = None
    limit: int | None = None
    out: Path | None = None
    jobs: int | None = None
    statistics: bool = False
    gate: bool = False
    json: bool = False


def run(asked: Asked) -> int:
    """The command. All that may be wrong is checked before the model is loaded.

    Returns the exit code: 1 with `gate` where a preset is red.
    """
    spec = _spec(asked)
    folder = asked.out or Path("mlxkv-eval") / Path(asked.model).name
    start = time.perf_counter()
    arms, parts = plan.make(spec)
    console.note("\n".join(arms.loaded.report()))
    calibrated = [name for name, config in arms.configs.items() if config.calibrated]
    if calibrated:  # a calibration is made once, before processes need it
        with arms.attached(
            max(calibrated, key=lambda name: arms.configs[name].balanced or arms.configs[name].low)
        ):
            pass
    results = workers.compute(spec, arms, parts, folder, asked.jobs or _jobs(asked.model))
    data = report.assemble(arms, spec.options, results, spec.windows)
    used = next(row for row in doctor.backends() if row["used"])
    data["machine"] = doctor.machine() | {"backend": used["name"], "device": used["device"]}
    data["versions"] = doctor.versions()
    data["seconds"] = round(time.perf_counter() - start, 1)
    report.write(data, folder)
    report.show(data, asked.statistics)
    console.note(f"{data['seconds']:.0f} s; report: {folder / 'report.html'}")
    if asked.json:
        console.print_json(report.brief(data))
    reds = [
        row for rows in data["rows"].values() for row in rows.values() if row["verdict"] == "red"
    ]
    return int(asked.gate and bool(reds))


def _spec(asked: Asked) -> plan.Spec:
    names = tuple(dict.fromkeys(name.strip() for name in asked.kv.split(",")))
    for name in names:
        parse_kv(name)  # a slip in the last one must not cost the work of the first
    lengths = [console.parse_tokens(text, "--context") for text in asked.context.split(",")]
    if min(lengths) < SHORTEST:
        raise UserError(f"[--context] must be at least {SHORTEST} tokens; got {min(lengths)}")
    for option in ("decode", "questions", "tokens", "limit", "jobs"):
        number = getattr(asked, option)
        if number is not None and number < 1:
            raise UserError(f"[--{option}] must be at least 1; got {number}; choose a larger one")
    if asked.needles not in NEEDLES:
        choices = ", ".join(NEEDLES)
        raise UserError(f"[--needles] unknown; got {asked.needles!r}; choose from {choices}")
    needles = asked.needles
    if needles == "auto":
        needles = "worlds" if asked.model.strip() in EMBEDDED else "plain"
    texts.check(asked.text)
    options = Options(
        tuple(dict.fromkeys(lengths)),
        asked.decode,
        asked.questions or (QUESTIONS_CPU if backend() == "cpu" else QUESTIONS),
        asked.tokens,
        tuple(asked.text),
        needles,
        tuple(dict.fromkeys(kind.strip() for kind in asked.kinds.split(","))),
    )
    retrieval.check(options)
    tasks, windows = _tasks(asked.tasks), _windows(asked.windows)
    return plan.Spec(
        *(asked.model, names, tasks, options, windows, asked.dtype, asked.limit),
        calibration=asked.calibration,
    )


def _tasks(text: str) -> tuple[str, ...]:
    tasks = tuple(dict.fromkeys(task.strip() for task in text.split(",")))
    for task in tasks:
        if task not in plan.ALL and not task.startswith(harness.PREFIX):
            choices = ", ".join(plan.ALL)
            raise UserError(
                f"[--tasks] unknown task; got {task!r}; choose from {choices}, {harness.PREFIX}NAME"
            )
    harness.check(tasks)
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


def _jobs(model: str) -> int:
    """Two processes where two small models fit and MLX would use one of several cores."""
    small = model.strip() in EMBEDDED
    return 2 if small and backend() == "cpu" and (os.cpu_count() or 1) > 1 else 1
