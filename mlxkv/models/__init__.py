"""The only code that touches mlx-lm's insides: names, loading, attaching, rules per layer.

Importing this package imports no framework; `load`, `attach` and `detach` bring one in when they
are first asked for. (No file here is called load or attach: a module of that name would hide the
function.)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxkv.models.layers import LayerReport, summarise
    from mlxkv.models.loader import Loaded, context_limit, load
    from mlxkv.models.seam import attach, detach

_HOME = {
    "attach": "seam",
    "detach": "seam",
    "LayerReport": "layers",
    "summarise": "layers",
    "Loaded": "loader",
    "context_limit": "loader",
    "load": "loader",
}

__all__ = [
    "LayerReport",
    "Loaded",
    "attach",
    "context_limit",
    "detach",
    "load",
    "summarise",
]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
