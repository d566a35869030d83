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
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from mlxkv.eval import plan
from mlxkv.eval.arms import BASELINE, Arms
from mlxkv.eval.store import Store
from mlxkv.eval.tasks.part import Part

Results = dict[str, dict[str, dict]]  # "TASK-NAME" -> arm -> result


def compute(spec: plan.Spec, arms: Arms, parts: list[Part], folder: Path, jobs: int = 1) -> Results:
    """Return the results of all parts. Results that `folder` holds are not computed again."""
    store = Store(folder)
    missing = {i: _missing(arms, part, store) for i, part in enumerate(parts)}
    missing = {i: names for i, names in missing.items() if names}
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bars:
        ids = {
            i: bars.add_task(_title(parts[i]), total=parts[i].steps * len(names), start=False)
            for i, names in missing.items()
        }

        def advance(i: int, n: int) -> None:
            bars.start_task(ids[i])
            bars.advance(ids[i], n)

        def done(i: int, seconds: float) -> None:
            bars.remove_task(ids[i])
            bars.console.print(f"{_title(parts[i])}: {seconds:.0f} s", highlight=False)

        for i in range(len(parts)):
            if i not in missing:
                bars.console.print(f"{_title(parts[i])}: kept from before", highlight=False)
        work = units(parts, missing)
        if min(jobs, len(work)) > 1:
            _side_by_side(spec, work, folder, jobs, advance, done)
        else:
            for i, names in missing.items():
                done(i, _one(arms, parts[i], names, store, lambda n, i=i: advance(i, n)))
    return {
        f"{part.task}-{part.name}": {name: store.read(arms, part, name) for name in _of(arms, part)}
        for part in parts
    }


def _of(arms: Arms, part: Part) -> list[str]:
    """Return the arms for which a part has a result."""
    return [name for name in arms.names if part.baseline or name != BASELINE]


def _missing(arms: Arms, part: Part, store: Store) -> list[str]:
    return [name for name in _of(arms, part) if store.read(arms, part, name) is None]


def _title(part: Part) -> str:
    return f"{part.task} {part.name}"


def _one(arms: Arms, part: Part, names: list[str], store: Store, progress) -> float:
    """Compute a part for some arms and store the results. Returns seconds."""
    start = time.perf_counter()
    found = part.run(arms, names, progress)
    for name in names:
        store.write(arms, part, name, found[name])
    return time.perf_counter() - start


_here: dict = {}  # in a worker process: arms, parts, store, queue


def _begin(spec: plan.Spec, folder: Path, queue) -> None:
    arms, parts = plan.make(spec)
    _here.update(arms=arms, parts=parts, store=Store(folder), queue=queue)


def _take(unit: list[tuple[int, list[str]]]) -> list[float]:
    queue, seconds = _here["queue"], []
    for i, names in unit:
        progress = partial(_tell, queue, i)
        seconds.append(_one(_here["arms"], _here["parts"][i], names, _here["store"], progress))
    return seconds


def _tell(queue, i: int, n: int) -> None:
    queue.put((i, n))


def units(parts: list[Part], missing: dict[int, list[str]]) -> list[list[tuple[int, list[str]]]]:
    """Group the missing parts: one process computes parts that share texts, one after the other."""
    groups: dict[str, list] = {}
    for i, names in missing.items():
        groups.setdefault(parts[i].shares or str(i), []).append((i, names))
    return list(groups.values())


def _side_by_side(
    spec: plan.Spec,
    work: list[list[tuple[int, list[str]]]],
    folder: Path,
    jobs: int,
    advance: Callable[[int, int], None],
    done: Callable[[int, float], None],
) -> None:
    context = multiprocessing.get_context("spawn")  # MLX does not survive a fork
    queue = context.Queue()
    pool = ProcessPoolExecutor(jobs, context, _begin, (spec, folder, queue))
    try:
        waiting: dict[Future, list] = {pool.submit(_take, unit): unit for unit in work}
        while waiting:
            ended, _ = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
            while True:
                try:
                    advance(*queue.get_nowait())
                except (Empty, KeyError):
                    break
            for future in ended:
                for (i, _), seconds in zip(waiting.pop(future), future.result(), strict=True):
                    done(i, seconds)
    except BaseException:
        for process in list(pool._processes.values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
