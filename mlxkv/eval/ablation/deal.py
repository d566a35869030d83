"""The arms of an ablation computed here, or dealt to processes that each load the model."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module

from rich.console import Console
from rich.progress import Progress

from mlxkv.eval.ablation.asked import Asked
from mlxkv.eval.part import Results


def module(what: str):
    """The file of an ablation: its names, steps, measure and show."""
    return import_module(f"mlxkv.eval.ablation.{what}")


def compute(what: str, asked: Asked, jobs: int = 1) -> Results:
    """A row per arm, in the order of the table. jobs: processes, dealt the arms in turn."""
    names = module(what).names(asked)
    shares = [names[i::jobs] for i in range(min(jobs, len(names)))]
    if len(shares) == 1:
        with Progress(console=Console(stderr=True), transient=True) as bars:
            bar = bars.add_task(what, total=len(names) * module(what).steps(asked))
            return module(what).measure(asked, names, lambda n: bars.advance(bar, n))
    context = multiprocessing.get_context("spawn")  # MLX does not survive a fork
    with ProcessPoolExecutor(len(shares), context) as pool:
        waiting = [pool.submit(_share, what, asked, share) for share in shares]
        found = {name: row for future in waiting for name, row in future.result().items()}
    return {name: found[name] for name in names}


def _share(what: str, asked: Asked, names: list[str]) -> Results:
    return module(what).measure(asked, names, lambda n: None)
