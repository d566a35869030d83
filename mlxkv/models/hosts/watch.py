"""Wait for the modules that load models (`HOSTS`), and wrap them as they are imported: `MLXKV=int4`.

Runs at the start of every Python where MLXKV is set, also in environments that have no mlxkv
(`mlxkv/run/site`): it imports the standard library only, mlxkv when a host is imported, and no failure
goes further than one line on stderr.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType

HOSTS = ("mlx_lm.utils", "mlx_vlm.utils", "mlx_lm.models.cache")
# Environment variables: a preset; 1: refuse rather than go on; 1: no reports, only what is wrong; tokens of the
# smallest sliding window that is compressed.
KV, STRICT, QUIET, WINDOWS = "MLXKV", "MLXKV_STRICT", "MLXKV_QUIET", "MLXKV_WINDOWS"
OFF = ("", "0", "off")


def asked() -> str | None:
    """The preset that MLXKV names, or None."""
    text = os.environ.get(KV, "").strip()
    return None if text.lower() in OFF else text


def strict() -> bool:
    """Return whether a model whose cache cannot be compressed ends the program."""
    return os.environ.get(STRICT, "").strip() not in OFF


class Watch:
    """A finder that hands the hosts to the other finders, and has the module wrapped once it has run."""

    is_of_mlxkv = True

    def find_spec(self, name: str, path=None, target=None):
        if name not in HOSTS:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if find is None or getattr(finder, "is_of_mlxkv", False):
                continue
            spec = find(name, path, target)
            if spec is not None:
                return _wrapped_after(spec)
        return None


def _wrapped_after(spec):
    """The spec, whose loader also wraps the module. The loader stays what it is, for tools that read sources."""
    loader = spec.loader
    run = getattr(loader, "exec_module", None)
    if run is not None:

        def exec_module(module: ModuleType) -> None:
            run(module)
            ready(module)

        loader.exec_module = exec_module  # of this loader, which serves one module
    return spec


def ready(module: ModuleType) -> None:
    """Wrap a host that has been imported. Says in one line why not."""
    try:
        # By name: what follows needs mlxkv, which this environment may not have.
        import_module("mlxkv.models.hosts.wrap").wrap(module)
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("mlxkv"):
            why = f"{sys.executable} has no mlxkv of this version; install it there"
        print(f"[mlxkv] {KV}={asked()} has no effect: {why}", file=sys.stderr, flush=True)
        if strict():
            sys.exit(2)


def start() -> None:
    """Wait for the hosts; those that are imported already are wrapped now. Nothing happens without MLXKV."""
    if asked() is None:
        return
    if not any(getattr(finder, "is_of_mlxkv", False) for finder in sys.meta_path):
        sys.meta_path.insert(0, Watch())
    for name in HOSTS:
        if (module := sys.modules.get(name)) is not None:
            ready(module)


def stop() -> None:
    """Wait no longer. What is wrapped stays so (`wrap.unwrap`)."""
    sys.meta_path[:] = [one for one in sys.meta_path if not getattr(one, "is_of_mlxkv", False)]
