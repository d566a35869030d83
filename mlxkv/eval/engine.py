"""Measure parts of an evaluation, each one task on one text, for several arms; resume stopped runs."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import mlx.core as mx

from mlxkv import __version__, console, errors
from mlxkv.errors import MachineError
from mlxkv.eval.arms import Arms
from mlxkv.eval.rows import Rows
from mlxkv.metal.launch import device_type

Results = dict[str, dict]  # arm -> plain data for JSON


@dataclass(frozen=True)
class TaskOptions:
    """The options of all tasks.

    contexts: tokens. decode: tokens decoded one by one after each context (divergence). questions: of each kind
    and context (retrieval). texts: the user's files and folders, read instead of built-in text. samples: texts of
    divergence, and documents of retrieval, that intervals are resampled from.
    """

    contexts: tuple[int, ...] = (2048,)
    decode: int = 256
    questions: int = 8
    texts: tuple[Path, ...] = ()
    samples: int = 8


@dataclass(frozen=True)
class Part:
    """One task on one text. task, text, context: identify its rows. asks: all other inputs of a result besides model
    and arm, as plain data; a stored result is used only if they are equal. run: (arms, names, progress) -> name and
    result of each arm, in order; names: only those without a stored result. steps: the sum of progress per name.
    beside: parts on other texts, read at once: a result is then a list, this part's first.
    """

    task: str
    text: str
    context: int
    run: Callable[[Arms, list[str], Callable[[int], None]], Iterable[tuple[str, dict]]]
    steps: int
    asks: dict = field(default_factory=dict)
    beside: tuple[Part, ...] = ()

    @property
    def texts(self) -> tuple[Part, ...]:
        return self, *self.beside

    @cached_property
    def digest(self) -> str:
        asks = json.dumps(self.asks, sort_keys=True, default=str)
        return hashlib.sha256(asks.encode()).hexdigest()


def row_of(arms: Arms, part: Part, name: str) -> tuple[dict, str]:
    """Return the identity of an arm's row, and the digest of all other inputs of its numbers: model, dtype,
    configuration, calibration, what the part asks, versions and backend."""
    identity = {
        "task": part.task,
        "split": "test",
        "model": arms.model_name,
        "preset": name,
        "windows": arms.windows,
        "text": part.text,
        "context": part.context,
    }
    used = arms.calibration(name)
    state = {
        "model": arms.loaded.fingerprint,
        "dtype": str(arms.loaded.dtype),
        "arm": arms.configs[name].as_dict(),
        "calibration": used and {"digest": used.digest, "layers": used.header()["layers"]},
        "asks": part.digest,
        "mlxkv": __version__,
        "mlx": mx.__version__,  # pyright: ignore[reportAttributeAccessIssue]  # not in mlx's stub
        "backend": device_type(),
    }
    text = json.dumps(state, sort_keys=True, default=str)
    return identity, hashlib.sha256(text.encode()).hexdigest()[:16]


def computed(
    arms: Arms,
    parts: Sequence[Part],
    rows: Rows,
    names: Sequence[str] | None = None,
    tolerant: bool = False,
) -> list[tuple[Part, Results]]:
    """Return the results of all parts, for all arms or those of `names`. Results in `rows` are not computed again;
    without a file of these, nothing is shown.

    tolerant: an arm that fails gets a row with its "error", no result, and the others go on, unless memory or the GPU
    is gone. Raises MachineError, and what a task raises.
    """
    names = arms.names if names is None else names
    missing = []
    for part in parts:
        left = [n for n in names if any(rows.get(*row_of(arms, x, n)) is None for x in part.texts)]
        if left:
            missing.append((part, left))
    left_steps = sum(part.steps * len(left) for part, left in missing)
    total = sum(part.steps for part in parts) * len(names)
    ended = len(parts) - len(missing)
    kept, shown = total - left_steps, rows.file is not None  # not for a call from Python
    begun = f"{kept / total:.0%} kept from before" if kept else "this takes a while"
    with console.progress("reading", total if shown else 0, begun, kept) as progress:
        try:
            for part, left in missing:
                _compute(arms, part, left, rows, tolerant, progress)
                ended += 1
        except KeyboardInterrupt:
            if rows.file is not None:
                console.note(
                    f"stopped; {ended} of {len(parts)} parts are kept in {rows.file.parent}, and the same "
                    "command continues from there"
                )
            raise
    found = [
        (one, {name: rows.get(*row_of(arms, one, name)) for name in names})
        for part in parts
        for one in part.texts
    ]
    return [(part, {name: x for name, x in of.items() if x}) for part, of in found]


def _compute(
    arms: Arms, part: Part, names: list[str], rows: Rows, tolerant: bool, progress
) -> None:
    """Add a row for each arm, in order."""
    left = list(names)
    while left:
        try:
            for name, numbers in part.run(arms, list(left), progress):
                each = numbers if isinstance(numbers, list) else [numbers]
                for one, own in zip(part.texts, each, strict=True):
                    rows.add(*row_of(arms, one, name), own)
                left.remove(name)
        except Exception as error:
            if not tolerant:
                raise
            name = left.pop(0)
            failure = {"error": _failure(error, name)}
            for one in part.texts:
                rows.add(*row_of(arms, one, name), failure)
    gc.collect()  # caches, before those of the next part are made


def _failure(error: Exception, name: str) -> str:
    """Return the reason in one line. Raises MachineError if all later work would fail too."""
    reason = errors.reason(error)
    if errors.is_of_memory(error) or errors.is_of_lost_gpu(error):
        said = "memory ran out" if errors.is_of_memory(error) else "the GPU failed"
        raise MachineError(
            f"[eval] {said} with {name}; got {reason}; what was measured is kept, the same command goes on"
        ) from error
    console.note(f"{name}: {type(error).__name__}: {reason}")
    return f"{type(error).__name__}: {reason}"
