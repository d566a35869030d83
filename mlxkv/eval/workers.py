"""Compute the results that a store does not hold yet, in this process or in several.

Several processes help on a CPU, where MLX uses one core at a time. Each loads the model.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from pathlib import Path
from queue import Empty

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from mlxkv.console import note
from mlxkv.eval import plan
from mlxkv.eval.arms import Arms
from mlxkv.eval.store import Store
from mlxkv.eval.tasks.part import Part

Results = dict[str, dict[str, dict]]  # "TASK-NAME" -> arm -> result


def compute(spec: plan.Spec, arms: Arms, parts: list[Part], folder: Path, jobs: int = 1) -> Results:
    """Return the results of all parts. Results that `folder` holds are not computed again."""
    store = Store(folder)
    missing = {i: _missing(arms, part, store) for i, part in enumerate(parts)}
    missing = {i: names for i, names in missing.items() if names}
    total = sum(parts[i].steps * len(names) for i, names in missing.items())
    ended = 0
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bars:
        bar = bars.add_task("reading", total=total)

        def done(i: int, seconds: float) -> None:
            nonlocal ended
            ended += 1
            bars.console.print(f"{_title(parts[i])}: {seconds:.0f} s", highlight=False)

        if before := len(parts) - len(missing):
            bars.console.print(f"{before} of {len(parts)} parts: kept from before", highlight=False)
        try:
            if min(jobs, len(missing)) > 1:
                _side_by_side(spec, missing, folder, jobs, partial(bars.advance, bar), done)
            else:
                for i, names in missing.items():
                    done(i, _run(arms, parts[i], names, store, partial(bars.advance, bar)))
        except KeyboardInterrupt:
            note(
                f"stopped; {before + ended} of {len(parts)} parts are kept in {folder}, and the same "
                "command goes on from there"
            )
            raise
    return {
        f"{part.task}-{part.name}": {name: store.read(arms, part, name) for name in arms.names}
        for part in parts
    }


def _missing(arms: Arms, part: Part, store: Store) -> list[str]:
    return [name for name in arms.names if store.read(arms, part, name) is None]


def _title(part: Part) -> str:
    return f"{part.task} {part.name}"


def _run(arms: Arms, part: Part, names: list[str], store: Store, progress) -> float:
    """Compute a part for some arms and store the results. Returns seconds."""
    start = time.perf_counter()
    results = part.run(arms, names, progress)
    for name in names:
        store.write(arms, part, name, results[name])
    return time.perf_counter() - start


_here: dict = {}  # in a worker process: arms, parts, store, queue


def _begin(spec: plan.Spec, folder: Path, queue) -> None:
    arms, parts = plan.make(spec)
    _here.update(arms=arms, parts=parts, store=Store(folder), queue=queue)


def _compute_here(i: int, names: list[str]) -> float:
    def progress(n: int) -> None:
        _here["queue"].put(n)

    return _run(_here["arms"], _here["parts"][i], names, _here["store"], progress)


def _side_by_side(
    spec: plan.Spec,
    missing: dict[int, list[str]],
    folder: Path,
    jobs: int,
    advance: Callable[[int], None],
    done: Callable[[int, float], None],
) -> None:
    context = multiprocessing.get_context("spawn")  # MLX does not survive a fork
    queue = context.Queue()
    pool = ProcessPoolExecutor(jobs, context, _begin, (spec, folder, queue))
    try:
        waiting: dict[Future, int] = {
            pool.submit(_compute_here, i, names): i for i, names in missing.items()
        }
        while waiting:
            ended, _ = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
            while True:
                try:
                    advance(queue.get_nowait())
                except Empty:
                    break
            for future in ended:
                done(waiting.pop(future), future.result())
    except BaseException:
        for process in list(pool._processes.values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
