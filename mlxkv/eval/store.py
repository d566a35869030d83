"""Keep results on disk, one file per part and arm, so that a killed run can go on; compute what is missing, with a
bar."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import cast
from urllib.parse import quote

import mlx.core as mx
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from mlxkv import __version__, console
from mlxkv.errors import MachineError, UserError
from mlxkv.eval.arms import Arms
from mlxkv.eval.engine import Results, TaskPart
from mlxkv.metal.launch import backend

FORMAT = 2


class ResultStore:
    """folder: holds `parts/TASK-NAME-ARM.json`. A result is used only if everything that it depends
    on is the same: model, dtype, arm, calibration, what the part asks, versions and backend."""

    def __init__(self, folder: Path):
        self.folder = folder / "parts"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"[--out] cannot write there; got {folder}: {error.strerror}") from None

    def read(self, arms: Arms, part: TaskPart, name: str) -> dict | None:
        """Return the result of an arm, or None if it must be computed."""
        try:
            data = json.loads(self._file(part, name).read_text(encoding="utf-8"))
            return data["result"] if data["of"] == _of(arms, part, name) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None  # no file, or one that was cut off while it was written

    def write(self, arms: Arms, part: TaskPart, name: str, result: dict) -> None:
        data = {"of": _of(arms, part, name), "result": result}
        file = self._file(part, name)
        try:
            scratch = file.with_suffix(f".{os.getpid()}.tmp")
            scratch.write_text(json.dumps(data), encoding="utf-8")
            os.replace(scratch, file)
        except OSError as error:
            raise MachineError(f"[eval] cannot keep a result: {error.strerror}") from None

    def _file(self, part: TaskPart, name: str) -> Path:
        return self.folder / f"{part.task}-{quote(part.name, '')}-{quote(name, '')}.json"


def _of(arms: Arms, part: TaskPart, name: str) -> dict:
    asks = json.dumps(part.asks, sort_keys=True, default=str)
    used = arms.calibration(name)
    return {
        "format": FORMAT,
        "model": arms.loaded.fingerprint,
        "dtype": str(arms.loaded.dtype),
        "arm": arms.configs[name].as_dict(),
        "calibration": used and {"digest": used.digest, "layers": used.header()["layers"]},
        "asks": hashlib.sha256(asks.encode()).hexdigest(),
        "mlxkv": __version__,
        "mlx": mx.__version__,  # pyright: ignore[reportAttributeAccessIssue]  # not in mlx's stub
        "backend": backend(),
    }


def computed(arms: Arms, parts: list[TaskPart], folder: Path) -> dict[str, Results]:
    """Return the results of all parts, by "TASK-NAME". Results that `folder` holds are not computed again."""
    store = ResultStore(folder)
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
                line = f"{console.plain(title)}: {seconds:.0f} s"
                bars.console.print(line, highlight=False, markup=False)
        except KeyboardInterrupt:
            console.note(
                f"stopped; {ended} of {len(parts)} parts are kept in {folder}, and the same "
                "command continues from there"
            )
            raise
    return {
        f"{part.task}-{part.name}": {
            name: cast(dict, store.read(arms, part, name)) for name in arms.names
        }
        for part in parts
    }
