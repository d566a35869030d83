"""Which machines have passed the tile kernels' test: on Metal they are used from then on.

Their lane map on Apple GPUs is known from reading MLX's kernels only, so `mlxkv doctor` tries them
first and leaves a note, for this GPU and these versions, in the user's cache folder.
"""

from __future__ import annotations

import json
import os
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from mlxkv.metal.launch import body, header

UNTRIED = "tiles have not been tried on this GPU; mlxkv doctor does"


def _path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mlxkv" / "tiles.json"


@cache
def _here() -> dict[str, str]:
    text = header("attend_tile") + body("attend_tile")
    return {
        "device": str(mx.device_info().get("device_name", "")),
        "mlx": version("mlx"),
        "text": sha256(text.encode()).hexdigest(),
    }


@cache
def why_not() -> str | None:
    """Why tiles are not used on this GPU, or None once they have passed."""
    try:
        noted = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return UNTRIED
    return None if noted == _here() else UNTRIED


def note(passed: bool) -> None:
    """Keep the outcome of a test of tiles on this GPU. A folder that cannot be written is no fault."""
    why_not.cache_clear()
    try:
        if passed:
            _path().parent.mkdir(parents=True, exist_ok=True)
            _path().write_text(json.dumps(_here()), encoding="utf-8")
        else:
            _path().unlink(missing_ok=True)
    except OSError:
        pass
