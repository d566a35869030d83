"""Compute the results that a store does not hold yet, with a bar."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from mlxkv.console import note
from mlxkv.eval.arms import Arms
from mlxkv.eval.store import Store
from mlxkv.eval.tasks.part import Part

Results = dict[str, dict[str, dict]]  # "TASK-NAME" -> arm -> result


def compute(arms: Arms, parts: list[Part], folder: Path) -> Results:
    """Return the results of all parts. Results that `folder` holds are not computed again."""
    store = Store(folder)
    missing = {}
    for part in parts:
        if names := [name for name in arms.names if store.read(arms, part, name) is None]:
            missing[f"{part.task} {part.name}"] = part, names
    total = sum(part.steps * len(names) for part, names in missing.values())
    ended = len(parts) - len(missing)
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bars:
        bar = bars.add_task("reading", total=total)
        if ended:
            bars.console.print(f"{ended} of {len(parts)} parts: kept from before", highlight=False)
        try:
            for title, (part, names) in missing.items():
                start = time.perf_counter()
                results = part.run(arms, names, lambda steps: bars.advance(bar, steps))
                for name in names:
                    store.write(arms, part, name, results[name])
                ended += 1
                seconds = time.perf_counter() - start
                bars.console.print(f"{title}: {seconds:.0f} s", highlight=False)
        except KeyboardInterrupt:
            note(
                f"stopped; {ended} of {len(parts)} parts are kept in {folder}, and the same "
                "command goes on from there"
            )
            raise
    return {
        f"{part.task}-{part.name}": {name: store.read(arms, part, name) for name in arms.names}
        for part in parts
    }
