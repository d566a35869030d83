"""Keep results on disk, one file per part and arm, so that a killed run can go on."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from urllib.parse import quote

import mlx.core as mx

from mlxkv import __version__
from mlxkv.errors import MachineError, UserError
from mlxkv.eval.arms import Arms
from mlxkv.eval.tasks.part import Part
from mlxkv.metal.launch import backend

FORMAT = 1


class Store:
    """folder: holds `parts/TASK-NAME-ARM.json`. A result is used only if everything that it depends
    on is the same: model, dtype, arm, calibration, what the part asks, versions and backend."""

    def __init__(self, folder: Path):
        self.folder = folder / "parts"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"[--out] cannot write there; got {folder}: {error.strerror}") from None

    def read(self, arms: Arms, part: Part, name: str) -> dict | None:
        """Return the result of an arm, or None if it must be computed."""
        try:
            data = json.loads(self._file(part, name).read_text(encoding="utf-8"))
            return data["result"] if data["of"] == _of(arms, part, name) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None  # no file, or one that was cut off while it was written

    def write(self, arms: Arms, part: Part, name: str, result: dict) -> None:
        data = {"of": _of(arms, part, name), "result": result}
        file = self._file(part, name)
        try:
            scratch = file.with_suffix(
                f".{os.getpid()}.tmp"
            )  # another process may write the same result
            scratch.write_text(json.dumps(data), encoding="utf-8")
            os.replace(scratch, file)
        except OSError as error:
            raise MachineError(f"[eval] cannot keep a result: {error.strerror}") from None

    def _file(self, part: Part, name: str) -> Path:
        return self.folder / f"{part.task}-{quote(part.name, '')}-{quote(name, '')}.json"


def _of(arms: Arms, part: Part, name: str) -> dict:
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
        "mlx": mx.__version__,
        "backend": backend(),
    }
