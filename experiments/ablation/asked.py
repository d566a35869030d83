"""Say what an ablation runs, as plain data that is checked first and can be sent to workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.ablation.recipes import RECIPES
from experiments.fixtures import QWEN
from experiments.options import at_least
from mlxkv.errors import UserError
from mlxkv.eval.tasks.retrieval import SHORTEST
from mlxkv.formats.config import CALIBRATED, Affine, CacheConfig, Side
from mlxkv.models.calibration.measure import LEAST, TOKENS

BITS = 2
PAPER = (0.96, 0.92)  # clips of keys and values


@dataclass(frozen=True)
class Asked:
    """context: tokens of the prompt. decode: tokens decoded one by one after it. questions: of each
    kind; 0 means no retrieval. tokens: to calibrate on. groups, clips: of the codes; every arm runs
    with each of them. sinks, recents: of `windows`. only: arms to run, all if empty. recipe: of the
    transforms that `domains` calibrates."""

    model: str = QWEN
    context: int = 8192
    decode: int = 512
    questions: int = 16
    tokens: int = TOKENS
    groups: tuple[int, ...] = (128,)
    clips: tuple[tuple[float, float], ...] = (PAPER,)
    sinks: tuple[int, ...] = (0, 16, 64, 128)
    recents: tuple[int, ...] = (0, 64, 256)
    only: tuple[str, ...] = ()
    recipe: str = "full"

    def check(self) -> None:
        """Raises UserError."""
        if self.recipe not in RECIPES:
            choices = ", ".join(RECIPES)
            raise UserError(f"[--recipe] unknown; got {self.recipe!r}; choose from {choices}")
        at_least("--context", self.context, SHORTEST)
        at_least("--decode", self.decode, 2)
        at_least("--questions", self.questions, 0)
        at_least("--tokens", self.tokens, LEAST)
        self.configs()  # checks groups and clips

    def configs(self) -> dict[str, CacheConfig]:
        """Return the codes to judge, by their label in tables, with the windows of the paper."""
        out = {}
        for group in self.groups:
            for keys, values in self.clips:
                sides = [Side(Affine(BITS, group, clip=c), CALIBRATED) for c in (keys, values)]
                label = f"group {group or 'all'}, clip {keys:g}/{values:g}".replace("0.", ".")
                out[label] = CacheConfig(*sides, sink=64, recent=256)
        return out

    def chosen(self, names: Sequence[str], option: str) -> list[str]:
        """Return those of `names` that are in `only`. Raises UserError for an unknown name."""
        if unknown := [name for name in self.only if name not in names]:
            choices = ", ".join(names)
            raise UserError(f"[{option}] unknown; got {unknown[0]!r}; choose from {choices}")
        return [name for name in names if not self.only or name in self.only]
