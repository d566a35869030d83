"""Wrap the functions of mlx-lm and mlx-vlm that load models: what they return gets compressed caches.

The module may be half imported when it is wrapped, so that frameworks are imported by the first call.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

from mlxkv.models.hosts import watch

# Of each host, the functions that return a model, alone or first of a tuple, of which the first one reads a folder;
# or saved caches.
LOADERS = {
    "mlx_lm.utils": ("load_model", "load", "sharded_load"),
    "mlx_vlm.utils": ("load_model", "load"),
    "mlx_lm.models.cache": ("load_prompt_cache",),
}
NAMES = ("model_path", "path_or_hf_repo", "repo")  # of what their first parameter takes
OURS = "__mlxkv_original__"  # of a wrapped function


class _Call(threading.local):
    """The outermost call of a loader in this thread. folder: from which weights were read."""

    depth = 0
    folder: Path | None = None
    shards: bool = False


_call = _Call()


def wrap(module: ModuleType) -> None:
    """Wrap the loaders of a host, and the names by which modules imported them already."""
    for name in LOADERS.get(module.__name__, ()):
        original = getattr(module, name, None)
        if callable(original) and not hasattr(original, OURS):
            made = _reader if name == "load_prompt_cache" else _wrapped
            _rename(original, made(original))


def unwrap(module: ModuleType) -> None:
    """Undo `wrap`."""
    for name in LOADERS.get(module.__name__, ()):
        found = getattr(module, name, None)
        if hasattr(found, OURS):
            _rename(found, getattr(found, OURS))


def _rename(old: Callable, new: Callable) -> None:
    """Put `new` in the place of `old` wherever a module knows it by its own name."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if isinstance(module, ModuleType) and names.get(old.__name__) is old:
            setattr(module, old.__name__, new)


def _wrapped(original: Callable) -> Callable:
    @functools.wraps(original)
    def loader(*args, **kwargs):
        if not _call.depth:
            _call.folder = None
        if original.__name__ == "load_model":
            _call.folder = _path(_asked(args, kwargs))
        if _call.depth or _is_ours(sys._getframe(1)):
            _call.depth += 1
            try:
                found = original(*args, **kwargs)
            finally:
                _call.depth -= 1
            if _call.shards:
                _before_it_is_shared(found)
            return found
        _call.depth, _call.shards = 1, original.__name__ == "sharded_load"
        try:
            found = original(*args, **kwargs)
        finally:
            _call.depth, _call.shards = 0, False
        _compress(found, str(_asked(args, kwargs)))
        return found

    setattr(loader, OURS, original)
    return loader


def _reader(original: Callable) -> Callable:
    @functools.wraps(original)
    def load_prompt_cache(*args, **kwargs):
        import_module(
            "mlxkv.models.hooks"
        )  # mlx-lm finds our classes from here on, before a model is loaded
        return original(*args, **kwargs)

    setattr(load_prompt_cache, OURS, original)
    return load_prompt_cache


def _asked(args: tuple, kwargs: dict) -> object:
    """Return what a loader is to load: a name on the hub, or a path."""
    return args[0] if args else next((kwargs[name] for name in NAMES if name in kwargs), None)


def _path(asked: object) -> Path | None:
    return Path(asked) if isinstance(asked, (str, Path)) else None


def _is_ours(frame) -> bool:
    """Return whether mlxkv itself asks for the model; it gives it a cache of its own."""
    caller = frame.f_globals.get("__name__", "")
    return caller.startswith("mlxkv.") and not caller.startswith("mlxkv.run.")


def _compress(found: object, name: str, group: object = None) -> None:
    """Give the model that a loader returned, alone or first of a tuple, compressed caches, and say so."""
    kv = watch.asked()
    if kv is None:
        return
    from mlxkv.models.hosts.given import give

    model, *rest = found if isinstance(found, tuple) else (found,)
    tokenizer = next((one for one in rest if not isinstance(one, dict)), None)
    give(model, kv, watch.strict(), name, _call.folder, tokenizer, group)


def _before_it_is_shared(found: object) -> None:
    """Have a model of `sharded_load` compressed as it is cut to the share of this process: calibrations are
    of whole models. Layers that are dealt to processes stay as they are."""
    model = found[0] if isinstance(found, tuple) else found
    folder = _call.folder
    inner = getattr(model, "model", None)

    def shard(group=None):
        vars(model).pop("shard")
        if group is not None and group.size() > 1:
            _call.folder = folder
            _compress(model, str(folder), group)
        return model.shard(group)

    def pipeline(group):
        vars(inner).pop("pipeline")
        if group.size() > 1:
            from mlxkv.models.hosts.given import left

            left(model, "layers are dealt to processes (--pipeline)", watch.strict())
        return inner.pipeline(group)

    if hasattr(model, "shard"):
        model.shard = shard
    if hasattr(inner, "pipeline"):
        inner.pipeline = pipeline
