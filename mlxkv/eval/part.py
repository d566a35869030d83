"""A part of an evaluation: one task on one text, for some arms. What is kept when a run is killed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mlxkv.eval.arms import Arms
from mlxkv.eval.document import KINDS

Progress = Callable[[int], None]
Results = dict[str, dict]  # arm -> plain data for JSON


@dataclass(frozen=True)
class Options:
    """What is asked of every task.

    contexts: tokens. decode: tokens decoded one by one behind each context (divergence). questions:
    of each kind and context (retrieval); half as many in generation. tokens: greedy tokens per
    prompt (generation). texts: files of the user to read in place of the built-in text. needles:
    "worlds" for models trained on `eval.worlds`, "plain" for all others. kinds: of questions
    (retrieval).
    """

    contexts: tuple[int, ...] = (2048,)
    decode: int = 256
    questions: int = 8
    tokens: int = 64
    texts: tuple[Path, ...] = ()
    needles: str = "worlds"
    kinds: tuple[str, ...] = KINDS


@dataclass(frozen=True)
class Part:
    """task, name: its file in the output folder. asks: everything its result depends on besides the
    model and the arm, plain data; a stored result is taken only where it is the same.
    run: (arms, names, progress) -> a result per name. Names never hold more than what is missing.
    steps: what progress adds up to per name. shares: parts of the same one have texts in common that
    are read once where one process computes them in a row. baseline: full precision has a result
    too.
    """

    task: str
    name: str
    run: Callable[[Arms, list[str], Progress], Results]
    steps: int
    asks: dict = field(default_factory=dict)
    shares: str = ""
    baseline: bool = True
