"""`python -m mlxkv.hook install`: have every program of a virtual environment look at MLXKV. Off unless installed.

One file, `mlxkv-hook.pth`, in the environment's site-packages. Python reads it as it starts; without MLXKV in
the environment that is one look-up. With MLXKV=int4, models that mlx-lm or mlx-vlm load get compressed caches.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from mlxkv import console
from mlxkv.errors import MachineError, UserError
from mlxkv.models.hosts import watch

NAME = "mlxkv-hook.pth"  # behind the files by which an editable mlxkv is found
# Python runs a line of a .pth that begins with "import"; twice where site-packages has two names (lib64).
LINE = (
    'import os, sys; os.environ.get("MLXKV") and not hasattr(sys, "mlxkv_hook") and exec("try:\\n'
    " sys.mlxkv_hook = True\\n"
    " from mlxkv.models.hosts import watch; watch.start()\\n"
    "except Exception as error:\\n"
    " print('[mlxkv] no hook:', type(error).__name__, ' '.join(str(error).split()), file=sys.stderr)"
    '")\n'
)
ACTIONS = ("install", "remove", "status")


def main(args: list[str] | None = None) -> int:
    args = sys.argv[1:] if args is None else args
    if len(args) != 1 or args[0] not in ACTIONS:
        raise UserError(f"[hook] one of {', '.join(ACTIONS)}; got {' '.join(args) or 'nothing'!r}")
    path = place()
    if args[0] == "install":
        install(path)
    elif args[0] == "remove":
        remove(path)
    print(told(path))
    return 0


def place() -> Path:
    """The file of this Python's environment."""
    return Path(sysconfig.get_path("purelib")) / NAME


def install(path: Path) -> None:
    """Raises UserError outside a virtual environment, whose programs are the user's to change."""
    if sys.prefix == sys.base_prefix:
        raise UserError(
            f"[hook] goes into a virtual environment; got {sys.prefix}; run the Python of one that has mlxkv"
        )
    try:
        path.write_text(LINE, encoding="utf-8")
    except OSError as error:
        raise MachineError(f"[hook] {path} cannot be written: {error.strerror}") from None


def remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise MachineError(f"[hook] {path} cannot be removed: {error.strerror}") from None


def told(path: Path) -> str:
    """Return whether the hook is there, and what MLXKV asks for now."""
    now = f"{watch.KV}={watch.asked()}" if watch.asked() else f"{watch.KV} is not set"
    if not path.exists():
        return f"not installed in {sys.prefix}; {now}"
    older = (
        "" if path.read_text(encoding="utf-8") == LINE else " (of another version: install again)"
    )
    return f"installed: {path}{older}; {now}"


if __name__ == "__main__":
    console.run_tool(main)
