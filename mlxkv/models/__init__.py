"""The only code that touches mlx-lm's insides: loading, attaching, calibrating, generating. Nothing here
knows a command.

Importing this package imports no framework; using `load`, `attach` or `detach` does. No file here is
called load or attach: a module of that name would hide the function.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxkv.models.attach_model import attach, detach
    from mlxkv.models.hooks.trees import trim_caches
    from mlxkv.models.loader import Loaded, context_limit, load
    from mlxkv.models.reports import LayerReport, summarise
    from mlxkv.models.warmup import warm_up

_HOME = {
    "attach": "attach_model",
    "trim_caches": "hooks.trees",
    "detach": "attach_model",
    "LayerReport": "reports",
    "summarise": "reports",
    "Loaded": "loader",
    "context_limit": "loader",
    "load": "loader",
    "warm_up": "warmup",
}

__all__ = [
    "LayerReport",
    "Loaded",
    "attach",
    "context_limit",
    "trim_caches",
    "detach",
    "load",
    "summarise",
    "warm_up",
]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
