"""Plan an evaluation: load the model with its arms, and list the parts to compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mlxkv.errors import UserError
from mlxkv.eval import feed
from mlxkv.eval.arms import Arms
from mlxkv.eval.tasks import divergence, generation, harness, retrieval, stages, subspace
from mlxkv.eval.tasks.part import Part, TaskOptions
from mlxkv.models import load
from mlxkv.texts import sources

TASKS = ("divergence", "retrieval", "generation", "stages")
ALL = (*TASKS, "subspace")  # subspace is for low-rank presets only


@dataclass(frozen=True)
class Spec:
    """All that a worker process needs to know, as plain data.

    tasks: of ALL, or `lm-eval:NAME`. windows: as for `Arms`. limit: questions per task of lm-eval.
    chunk: tokens of its prompts that are read at once, 0 for prompts read by mlx-lm.
    calibration: a file or hub name, for calibrated presets; the model's own by default.
    """

    model: str
    names: tuple[str, ...]
    tasks: tuple[str, ...] = TASKS
    options: TaskOptions = field(default_factory=TaskOptions)
    windows: tuple[int, int] | None = (64, 64)
    dtype: str | None = None
    limit: int | None = None
    chunk: int = feed.PREFILL
    calibration: str | None = None


def make(spec: Spec) -> tuple[Arms, list[Part]]:
    """Load the model; return arms and parts, in the order of ALL, the same in every process."""
    loaded = load(spec.model, "fp16", dtype=spec.dtype, calibration=spec.calibration)
    options = spec.options
    longest = max(options.contexts)
    if loaded.context and longest > loaded.context:
        raise UserError(
            f"[--context] longer than {loaded.name} was made for; got {longest}; "
            f"choose {loaded.context} or less"
        )
    arms = Arms(loaded, spec.names, spec.windows)

    def text_of(count: int) -> sources.Text:
        return sources.evaluation_tokens(arms.loaded, count, options.texts)

    def texts_of(count: int) -> list[sources.Text]:
        return sources.evaluation_texts(arms.loaded, count, options.samples, options.texts)

    makers: dict[str, Callable[[], list[Part]]] = {
        "divergence": lambda: divergence.parts(arms, options, texts_of),
        "retrieval": lambda: retrieval.parts(arms, options),
        "generation": lambda: generation.parts(arms, options),
        "stages": lambda: stages.parts(arms, options, lambda count: text_of(count).tokens),
        "subspace": lambda: subspace.parts(arms, options, lambda count: text_of(count).tokens),
    }
    parts = [part for task in ALL if task in spec.tasks for part in makers[task]()]
    return arms, parts + harness.parts(spec.tasks, spec.limit, spec.chunk)
