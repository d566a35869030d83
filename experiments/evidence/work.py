"""Share units out to processes, measure those that are missing, and stop when the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from experiments.evidence import rows
from experiments.evidence.measure import KL, RETRIEVAL, Asked, Subject, Unit
from mlxkv import console, faults
from mlxkv.errors import MachineError, UserError


def units(
    asked: Asked,
    presets: Mapping[str, Sequence[str]],
    windows: Sequence[str],
    splits: Sequence[str],
    contexts: Sequence[int],
    documents: int,
    document: int,
) -> list[Unit]:
    """Return all units, those of one model, windows and preset side by side.

    presets: by model. documents: of questions, of `document` tokens each."""
    out = []
    for model, names in presets.items():
        for pair in windows:
            for preset in names:
                start = (model, pair, preset)
                for split in splits:
                    for context in contexts:
                        for text in asked.held.names(split):
                            out.append(Unit(*start, KL, split, text, context))
                for index in range(documents):
                    name = asked.held.document_name(index)
                    out.append(Unit(*start, RETRIEVAL, "haystack", name, document, index))
    return out


def share(asked: Asked, found: Sequence[Unit], which: int, of: int) -> list[Unit]:
    """Return stretch `which` (from 1) of `of` stretches of equal work: neighbours have a preset in
    common, whose kernels are compiled once."""
    total = sum(unit.calls(asked) for unit in found)
    out, before = [], 0
    for unit in found:
        middle = before + unit.calls(asked) / 2
        before += unit.calls(asked)
        if int(middle * of / total) == which - 1:
            out.append(unit)
    return out


def run(
    asked: Asked,
    mine: Sequence[Unit],
    presets: Mapping[str, Sequence[str]],
    file: Path,
    seconds: float | None = None,
    first: int = 0,
    subject: Callable[[Asked, str, Sequence[str]], Subject] = Subject,
) -> tuple[int, int, int]:
    """Measure the units that `file` has no result of; return how many were measured, failed and left.

    A unit that fails gets a row with its error. seconds: to stop after, with the unit that is being
    measured. first: where to start with full precision, so that processes share its texts.
    """
    start = time.perf_counter()
    known = {rows.key(row): row for row in (rows.read([file]) if file.exists() else ())}
    measured = failed = left = 0

    def over() -> bool:
        return seconds is not None and time.perf_counter() - start > seconds

    for model, group in groupby(mine, key=lambda unit: unit.model):
        here = list(group)
        if over():
            left += len(here)
            continue
        made = subject(asked, model, presets[model])
        here = [unit for unit in here if not _known(made, unit, known)]
        _bases(made, _turned(_texts(here), first), over)
        ahead = sum(unit.calls(asked) for unit in here)
        for (windows, preset), some in groupby(here, key=lambda unit: (unit.windows, unit.preset)):
            wanted, begun = list(some), time.perf_counter()
            ahead -= (calls := sum(unit.calls(asked) for unit in wanted))
            found = [0, 0]  # measured, failed
            for unit, numbers in _measured(made, windows, preset, wanted, over):
                if numbers is None:
                    left += 1
                    continue
                found["error" in numbers] += 1
                rows.append(file, unit.identity | numbers)
            measured, failed = measured + found[0], failed + found[1]
            if any(found):
                took = time.perf_counter() - begun
                what = f"{Path(model).name}, windows {windows}, {preset}"
                rest = f"; the rest at this pace: {_long(took * ahead / calls)}" if ahead else ""
                console.note(f"{what}: {found[0]} texts, {found[1]} failed, {took:.0f} s{rest}")
    return measured, failed, left


def _long(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def _bases(made: Subject, texts: Sequence[Unit], over: Callable[[], bool]) -> None:
    """Let full precision read the texts. A failure comes again, with the row of each preset."""
    for unit in texts:
        if not over():
            _tried(lambda unit=unit: made.read_base(unit))


def _measured(
    made: Subject, windows: str, preset: str, wanted: list[Unit], over: Callable[[], bool]
) -> Iterator[tuple[Unit, dict | None]]:
    """Yield each unit with its numbers or error, or None once the time is over."""
    done = 0
    try:
        with made.arms(windows).attached(preset) as loaded:
            for some in _alike(wanted, made.together):
                if over():
                    break
                yield from zip(some, _rows(made, some, loaded), strict=True)
                done += len(some)
    except Exception as error:  # the preset does not fit the model
        for unit in wanted[done:]:
            yield unit, _failure(error)
        return
    for unit in wanted[done:]:
        yield unit, None


def _rows(made: Subject, some: list[Unit], loaded) -> list[dict]:
    """The numbers or error of each unit; those of a batch that fails are tried one by one."""

    def rows_of(units: list[Unit]) -> list[dict]:
        found = made.measure(units, loaded)
        when = round(time.time(), 6)
        return [
            {"of": made.of(unit), "state": made.state(unit), "when": when} | numbers
            for unit, numbers in zip(units, found, strict=True)
        ]

    try:
        return rows_of(some)
    except Exception as error:  # of any layer below; the others go on
        if len(some) == 1:
            return [_failure(error)]
        return [row for unit in some for row in _rows(made, [unit], loaded)]


def _alike(wanted: Sequence[Unit], most: int) -> Iterator[list[Unit]]:
    """Yield up to `most` neighbours that are texts of one context, and documents one by one."""
    some: list[Unit] = []
    for unit in wanted:
        alike = (
            some
            and unit.task == KL
            and (unit.task, unit.context) == (some[0].task, some[0].context)
        )
        if some and (not alike or len(some) == most):
            yield some
            some = []
        some.append(unit)
    if some:
        yield some


def _tried(measure: Callable[[], dict | None]) -> dict | None:
    try:
        return measure()
    except Exception as error:  # of any layer below; the others go on
        return _failure(error)


def _failure(error: Exception) -> dict:
    """Return the error as a row has it. Raises MachineError where all later units would fail with it, too."""
    if faults.is_of_lost_gpu(error):
        raise MachineError(
            f"[evidence] the GPU failed and this process lost it; got {faults.reason(error)}; what was "
            "measured is kept, the same command goes on, with fewer processes if it comes again"
        ) from error
    return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def _known(made: Subject, unit: Unit, known: dict) -> bool:
    """Whether a result is of the same model, settings and text. An error is tried again."""
    row = known.get(rows.key(unit.identity))
    if row is None or "error" in row:
        return False
    found = _tried(lambda: {"of": made.of(unit)})
    return found.get("of") == row.get("of")


def _texts(some: Sequence[Unit]) -> list[Unit]:
    """Return one unit per text whose KL is measured."""
    found = {(unit.split, unit.text, unit.context): unit for unit in some if unit.task == KL}
    return list(found.values())


def _turned(some: list, first: int) -> list:
    at = first % len(some) if some else 0
    return [*some[at:], *some[:at]]


def parse_share(text: str) -> tuple[int, int]:
    """'2/16' -> (2, 16). Raises UserError."""
    which, _, of = text.partition("/")
    if not (which.isdigit() and of.isdigit() and 1 <= int(which) <= int(of)):
        raise UserError(f"[--shares] not a share; got {text!r}; write I/N such as 1/16")
    return int(which), int(of)
