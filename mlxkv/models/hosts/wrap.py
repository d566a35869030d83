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
from importlib import import_module
from pathlib import Path
from types import ModuleType

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
    shards: bool = False


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
        """The spec, whose loader also wraps the module. The loader stays what it is, for tools that read sources."""
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
        asked = args[0] if args else next((kwargs[n] for n in NAMES if n in kwargs), None)
        outermost = not _call.depth
        if outermost:
            _call.folder, _call.shards = None, original.__name__ == "sharded_load"
        if original.__name__ == "load_model":
            _call.folder = Path(asked) if isinstance(asked, (str, Path)) else None
        # mlxkv gives the models that it loads caches of its own.
        ours = sys._getframe(1).f_globals.get("__name__", "").startswith("mlxkv.")
        _call.depth += 1
        try:
            found = original(*args, **kwargs)
        finally:
            _call.depth -= 1
        if outermost and not ours:
            compress(found, str(asked), options)
        elif _call.shards:
            _before_it_is_shared(found, options)
        return found

    return loader


def _reader(original: Callable) -> Callable:
    @wraps(original)
    def load_prompt_cache(*args, **kwargs):
        import_module("mlxkv.models.hooks")  # mlx-lm finds our classes, before a model is loaded
        return original(*args, **kwargs)

    return load_prompt_cache


def compress(found: object, name: str, options: Options, group: object = None) -> None:
    """Give the model that a loader returned, alone or first of a tuple, compressed caches, and say so."""
    from mlxkv.models.hosts.give import give

    model, *more = found if isinstance(found, tuple) else (found,)
    tokenizer = next((one for one in more if not isinstance(one, dict)), None)
    give(model, options, name, _call.folder, tokenizer, group)


def _before_it_is_shared(found: object, options: Options) -> None:
    """Have a model of `sharded_load` compressed as it is cut to the share of this process: calibrations are
    of whole models. Layers that are dealt to processes stay as they are."""
    model = found[0] if isinstance(found, tuple) else found
    folder = _call.folder
    inner = getattr(model, "model", None)

    def shard(group=None):
        vars(model).pop("shard")
        if group is not None and group.size() > 1:
            _call.folder = folder
            compress(model, str(folder), options, group)
        return model.shard(group)

    def pipeline(group):
        vars(inner).pop("pipeline")
        if group.size() > 1:
            from mlxkv.models.hosts.give import pass_over

            pass_over(model, "layers are dealt to processes (--pipeline)", options)
        return inner.pipeline(group)

    if hasattr(model, "shard"):
        model.shard = shard
    if hasattr(inner, "pipeline"):
        inner.pipeline = pipeline
