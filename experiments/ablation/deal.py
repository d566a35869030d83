"""Compute the arms of an ablation here, or in processes that each load the model."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from experiments.ablation.asked import Asked
from mlxkv.eval.tasks.part import Results

TOGETHER = 4


def module(what: str):
    """Return the module of an ablation, with its names, steps, measure and show."""
    return import_module(f"experiments.ablation.{what}")


def compute(
    what: str,
    asked: Asked,
    jobs: int = 1,
    known: Results | None = None,
    keep: Callable[[Results], None] = lambda rows: None,
) -> Results:
    """Return a row per arm, in the order of the table. jobs: processes. known: rows of an earlier
    run, not computed again. keep: called with all rows so far when new ones are ready."""
    names = module(what).names(asked)
    found = {name: row for name, row in (known or {}).items() if name in names}
    shares = _shares([name for name in names if name not in found], jobs)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bars:
        bar = bars.add_task(what, total=len(names) * module(what).steps(asked))
        bars.advance(bar, len(found) * module(what).steps(asked))

        def take(rows: Results) -> None:
            found.update(rows)
            keep({name: found[name] for name in names if name in found})

        if jobs == 1 or len(shares) == 1:
            for share in shares:
                take(module(what).measure(asked, share, lambda n: bars.advance(bar, n)))
        else:
            for rows in _side_by_side(what, asked, shares, jobs):
                bars.advance(bar, len(rows) * module(what).steps(asked))
                take(rows)
    return {name: found[name] for name in names}


def _shares(names: list[str], jobs: int) -> list[list[str]]:
    """Group the arms that are computed and kept together: they share the baseline."""
    if jobs == 1 and len(names) <= TOGETHER:
        return [names] if names else []
    count = -(-len(names) // min(TOGETHER, -(-len(names) // jobs))) if names else 0
    return [names[i::count] for i in range(count)]


def _side_by_side(what: str, asked: Asked, shares: list[list[str]], jobs: int) -> Iterator[Results]:
    context = multiprocessing.get_context("spawn")  # MLX does not survive a fork
    pool = ProcessPoolExecutor(min(jobs, len(shares)), context)
    try:
        waiting = [pool.submit(_share, what, asked, share) for share in shares]
        for future in as_completed(waiting):
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _share(what: str, asked: Asked, names: list[str]) -> Results:
    return module(what).measure(asked, names, lambda n: None)
