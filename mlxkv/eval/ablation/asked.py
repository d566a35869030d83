"""What is asked of an ablation: plain data, checked before anything heavy, sent to workers as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxkv.calibrate import LEAST, TOKENS
from mlxkv.config import CALIBRATED, Affine, CacheConfig, Side
from mlxkv.errors import UserError
from mlxkv.eval.ablation.recipes import RECIPES
from mlxkv.eval.retrieval import SHORTEST

BITS = 2
PAPER = (0.96, 0.92)  # clips of keys and values


@dataclass(frozen=True)
class Asked:
    """context, decode: tokens; decode of them one by one behind the context. questions: of each
    kind, 0 leaves retrieval out. tokens: to calibrate on. groups, clips: of the codes; every arm is
    judged with each of them. sinks, recents: of `windows`. only: arms to take, all if empty. recipe:
    of the transforms that `domains` calibrates."""

    model: str = "tiny-qwen"
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
        _least("--context", self.context, SHORTEST)
        _least("--decode", self.decode, 2)
        _least("--questions", self.questions, 0)
        _least("--tokens", self.tokens, LEAST)
        self.configs()  # groups and clips are checked where they are made

    def configs(self) -> dict[str, CacheConfig]:
        """The codes to judge, by what a table calls them. Windows are those of the paper."""
        out = {}
        for group in self.groups:
            for keys, values in self.clips:
                sides = [Side(Affine(BITS, group, clip=c), CALIBRATED) for c in (keys, values)]
                label = f"group {group or 'all'}, clip {keys:g}/{values:g}".replace("0.", ".")
                out[label] = CacheConfig(*sides, sink=64, recent=256)
        return out

    def chosen(self, names: Sequence[str], option: str) -> list[str]:
        """`names` less what was not asked for. Raises UserError."""
        if unknown := [name for name in self.only if name not in names]:
            choices = ", ".join(names)
            raise UserError(f"[{option}] unknown; got {unknown[0]!r}; choose from {choices}")
        return [name for name in names if not self.only or name in self.only]


def _least(option: str, got: int, least: int) -> None:
    if got < least:
        raise UserError(f"[{option}] must be at least {least}; got {got}; choose {least} or more")


def numbers(text: str, option: str) -> tuple[int, ...]:
    """'128,64' -> (128, 64). Raises UserError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise UserError(f"[{option}] not whole numbers; got {text!r}; write them like 128,64,32")
    return tuple(dict.fromkeys(map(int, parts)))


def pairs(texts: Sequence[str], option: str) -> tuple[tuple[float, float], ...]:
    """['.96,.92'] -> ((.96, .92),). Raises UserError."""
    out = []
    for text in texts:
        try:
            keys, values = map(float, text.split(","))
        except ValueError:
            raise UserError(
                f"[{option}] not two numbers; got {text!r}; write KEYS,VALUES such as .96,.92"
            ) from None
        out.append((keys, values))
    return tuple(dict.fromkeys(out))
