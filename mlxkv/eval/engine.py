"""`TaskPart`: one task on one text, for some arms. Its results are kept if a run is killed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mlxkv.eval.arms import Arms
from mlxkv.eval.questions import KINDS

Progress = Callable[[int], None]
Results = dict[str, dict]  # arm -> plain data for JSON


@dataclass(frozen=True)
class TaskOptions:
    """The options of all tasks.

    contexts: tokens. decode: tokens decoded one by one after each context (divergence). questions: of each kind
    and context (retrieval). texts: the user's files and folders, read instead of built-in text. kinds: of
    questions (retrieval). samples: texts of divergence, and documents of retrieval, that intervals are
    resampled from.
    """

    contexts: tuple[int, ...] = (2048,)
    decode: int = 256
    questions: int = 8
    texts: tuple[Path, ...] = ()
    kinds: tuple[str, ...] = KINDS
    samples: int = 8


@dataclass(frozen=True)
class TaskPart:
    """task, name: they name its files. asks: all that a result depends on besides model and arm, as
    plain data; a stored result is used only if it is the same. run: (arms, names, progress) -> a
    result per name; it gets only the names without a stored result. steps: the sum of progress per
    name.
    """

    task: str
    name: str
    run: Callable[[Arms, list[str], Progress], Results]
    steps: int
    asks: dict = field(default_factory=dict)


def by_context(
    results: dict[str, Results], task: str
) -> tuple[dict[str, list[Results]], dict[str, Results]]:
    """Return the results of a task, "TASK-2048-3" of the third text of 2048 tokens, by context; and the results of
    others."""
    contexts: dict[str, list[Results]] = {}
    others = {}
    for key, result in results.items():
        if match := re.fullmatch(rf"{task}-(\d+)-\d+", key):
            contexts.setdefault(match[1], []).append(result)
        else:
            others[key] = result
    return contexts, others
