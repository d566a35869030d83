"""Wrap the model loaders of mlx-lm and mlx-vlm when a program imports them, so that its models get compressed caches.

Imports nothing heavy: the program may set up its environment before it imports a framework.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from pathlib import Path
from types import ModuleType

from mlxkv.run import Options

# By module: functions that return a model, alone or first in a tuple (the first one reads a folder), or saved caches.
LOADERS = {
    "mlx_lm.utils": ("load_model", "load", "sharded_load"),
    "mlx_vlm.utils": ("load_model", "load"),
    "mlx_lm.models.cache": ("load_prompt_cache",),
}
NAMES = ("model_path", "path_or_hf_repo", "repo")  # of their first parameter


class _Call(threading.local):
    """The outermost loader call in this thread. folder: that weights were read from. adapter: put beside them."""

    depth = 0
    folder: Path | None = None
    adapter: Path | None = None


_call = _Call()


def watch(options: Options) -> None:
    """Wrap the loaders as the program imports them."""
    sys.meta_path.insert(0, _Finder(options))


@dataclass
class _Finder:
    """Wraps the loaders in a module once it has run; other finders find the modules."""

    options: Options

    def find_spec(self, name: str, path=None, target=None):
        if name not in LOADERS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and (loader := spec.loader) is not None:
            run = loader.exec_module  # tools that read sources need this loader, so it stays

            def exec_module(module: ModuleType) -> None:
                run(module)
                wrap(module, self.options)

            loader.exec_module = exec_module
        return spec


def wrap(module: ModuleType, options: Options) -> None:
    """Wrap the functions of `module` that load models or caches."""
    for name in LOADERS[module.__name__]:
        if callable(original := getattr(module, name, None)):
            reads = name == "load_prompt_cache"
            setattr(module, name, _reader(original) if reads else _wrapped(original, options))


def _wrapped(original: Callable, options: Options) -> Callable:
    @wraps(original)
    def loader(*args, **kwargs):
        name = args[0] if args else next((kwargs[n] for n in NAMES if n in kwargs), None)
        outermost = not _call.depth
        if outermost:
            given = signature(original).bind(*args, **kwargs).arguments.get("adapter_path")
            _call.folder, _call.adapter = None, Path(given) if given else None
        if original.__name__ == "load_model":
            _call.folder = Path(name) if isinstance(name, (str, Path)) else None
        _call.depth += 1
        try:
            loaded = original(*args, **kwargs)
        finally:
            _call.depth -= 1
        if outermost:
            from mlxkv.run.attach_loaded import compress

            compress(loaded, options, str(name), _call.folder, _call.adapter)
        return loaded

    return loader


def _reader(original: Callable) -> Callable:
    @wraps(original)
    def load_prompt_cache(*args, **kwargs):
        from mlxkv.patching.mark import register_caches

        register_caches()  # before a model is loaded
        return original(*args, **kwargs)

    return load_prompt_cache
