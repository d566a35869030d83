"""What an evaluation consists of: the model with its arms, and the parts to compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mlxkv.eval import divergence, generation, harness, retrieval, stages, subspace, texts
from mlxkv.eval.arms import Arms
from mlxkv.eval.part import Options, Part
from mlxkv.models import load

TASKS = ("divergence", "retrieval", "generation", "stages")
ALL = (*TASKS, "subspace")  # with those that only some presets have


@dataclass(frozen=True)
class Spec:
    """All that a process needs to know to take part; plain data, to be sent to workers.

    tasks: of ALL, or `lm-eval:NAME`. windows: as for `Arms`. limit: questions per task of lm-eval.
    calibration: a file or hub name, for calibrated presets; the model's own by default.
    """

    model: str
    names: tuple[str, ...]
    tasks: tuple[str, ...] = TASKS
    options: Options = field(default_factory=Options)
    windows: tuple[int, int] | None = (64, 64)
    dtype: str | None = None
    limit: int | None = None
    calibration: str | None = None


def make(spec: Spec) -> tuple[Arms, list[Part]]:
    """Load the model; the parts in the order of ALL, the same in every process."""
    loaded = load(spec.model, "fp16", dtype=spec.dtype, calibration=spec.calibration)
    arms = Arms(loaded, spec.names, spec.windows)
    options = spec.options

    def text_of(count: int) -> texts.Text:
        return texts.evaluation_tokens(arms.loaded, count, options.texts)

    makers: dict[str, Callable[[], list[Part]]] = {
        "divergence": lambda: divergence.parts(arms, options, text_of),
        "retrieval": lambda: retrieval.parts(arms, options),
        "generation": lambda: generation.parts(arms, options),
        "stages": lambda: stages.parts(arms, options, lambda count: text_of(count).tokens),
        "subspace": lambda: subspace.parts(arms, options, lambda count: text_of(count).tokens),
    }
    parts = [part for task in ALL if task in spec.tasks for part in makers[task]()]
    return arms, parts + harness.parts(spec.tasks, spec.limit)
