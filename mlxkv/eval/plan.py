"""Plan an evaluation: load the model with its arms, and list the parts to compute."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxkv.errors import UserError
from mlxkv.eval.arms import Arms
from mlxkv.eval.tasks import divergence, retrieval
from mlxkv.eval.tasks.part import Part, TaskOptions
from mlxkv.models import load
from mlxkv.texts import sources

TASKS = ("divergence", "retrieval")


@dataclass(frozen=True)
class Spec:
    """What is evaluated.

    tasks: of TASKS. windows: as for `Arms`. calibration: a file or hub name, for calibrated presets; the
    model's own by default.
    """

    model: str
    names: tuple[str, ...]
    tasks: tuple[str, ...] = TASKS
    options: TaskOptions = field(default_factory=TaskOptions)
    windows: tuple[int, int] | None = (64, 64)
    dtype: str | None = None
    calibration: str | None = None


def make(spec: Spec) -> tuple[Arms, list[Part]]:
    """Load the model; return arms and parts, in the order of TASKS."""
    loaded = load(spec.model, "fp16", dtype=spec.dtype, calibration=spec.calibration)
    options = spec.options
    longest = max(options.contexts)
    if loaded.context and longest > loaded.context:
        raise UserError(
            f"[--context] longer than {loaded.name} was made for; got {longest}; "
            f"choose {loaded.context} or less"
        )
    arms = Arms(loaded, spec.names, spec.windows)

    def texts_of(count: int) -> list[sources.Text]:
        return sources.evaluation_texts(loaded, count, options.samples, options.texts)

    parts: list[Part] = []
    if "divergence" in spec.tasks:
        parts += divergence.parts(arms, options, texts_of)
    if "retrieval" in spec.tasks:
        parts += retrieval.parts(arms, options)
    return arms, parts
