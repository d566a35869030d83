"""Wrap the functions of mlx-lm and mlx-vlm that load models, as a program imports them: what they return gets
compressed caches.

Imports nothing heavy: the program may set up its environment before it imports a framework.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from mlxkv.models.hosts import Options

# Of each host, the functions that return a model, alone or first of a tuple, of which the first one reads a folder;
# or saved caches.
LOADERS = {
    "mlx_lm.utils": ("load_model", "load", "sharded_load"),
    "mlx_vlm.utils": ("load_model", "load"),
    "mlx_lm.models.cache": ("load_prompt_cache",),
}
NAMES = ("model_path", "path_or_hf_repo", "repo")  # of what their first parameter takes


class _Call(threading.local):
    """The outermost call of a loader in this thread. folder: from which weights were read."""

    depth = 0
    folder: Path | None = None


_call = _Call()


def watch(options: Options) -> None:
    """Have the hosts wrapped as they are imported."""
    sys.meta_path.insert(0, _Finder(options))


@dataclass
class _Finder:
    """Hands the hosts to the other finders, and has the module wrapped once it has run."""

    options: Options

    def find_spec(self, name: str, path=None, target=None):
        if name not in LOADERS:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if find is None or finder is self:
                continue
            spec = find(name, path, target)
            if spec is not None:
                return self._wrapped_after(spec)
        return None

    def _wrapped_after(self, spec):
        """Return the spec, whose loader also wraps the module. The loader stays what it is, for tools that read
        sources."""
        loader = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            wrap(module, self.options)

        loader.exec_module = exec_module  # of this loader, which serves one module
        return spec


def wrap(module: ModuleType, options: Options) -> None:
    """Wrap the loaders of a host."""
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
            _call.folder = None
        if original.__name__ == "load_model":
            _call.folder = Path(name) if isinstance(name, (str, Path)) else None
        _call.depth += 1
        try:
            loaded = original(*args, **kwargs)
        finally:
            _call.depth -= 1
        if outermost:
            compress(loaded, str(name), options)
        return loaded

    return loader


def _reader(original: Callable) -> Callable:
    @wraps(original)
    def load_prompt_cache(*args, **kwargs):
        from mlxkv.models.hooks.mark import register_caches

        register_caches()  # before a model is loaded
        return original(*args, **kwargs)

    return load_prompt_cache


def compress(loaded: Any, name: str, options: Options) -> None:
    """Give the model that a loader returned, alone or first of a tuple, compressed caches, and say so."""
    from mlxkv.models.hosts.attach_loaded import attach_loaded

    model, *companions = loaded if isinstance(loaded, tuple) else (loaded,)
    tokenizer = next(
        (companion for companion in companions if not isinstance(companion, dict)), None
    )
    attach_loaded(model, options, name, _call.folder, tokenizer)
