"""Local LLMs with a compressed KV cache, on MLX.

Importing this imports nothing else. The names below are the public API (docs/reference/python.md); the first use of
one prepares the process for MLX (`mlxkv.startup`) and imports its module.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxkv.catalog.reports import LayerReport
    from mlxkv.codec.own import Method
    from mlxkv.errors import UserError
    from mlxkv.eval.call import eval
    from mlxkv.formats.config import CacheConfig, Side
    from mlxkv.formats.names import parse_kv
    from mlxkv.generate.prompt_cache import load_prompt_cache
    from mlxkv.loading.attach import attach, detach
    from mlxkv.loading.load import Loaded, load
    from mlxkv.loading.warmup import warm_up

__version__ = "0.2.0"
__all__ = [
    "CacheConfig",
    "LayerReport",
    "Loaded",
    "Method",
    "Side",
    "UserError",
    "attach",
    "detach",
    "eval",
    "load",
    "load_prompt_cache",
    "parse_kv",
    "warm_up",
]
_MODULES = {
    "CacheConfig": "formats.config",
    "Side": "formats.config",
    "UserError": "errors",
    "parse_kv": "formats.names",
    "LayerReport": "catalog.reports",
    "eval": "eval",
}
_MLX = {  # of what needs MLX
    "Loaded": "loading.load",
    "Method": "codec.own",
    "load": "loading.load",
    "load_prompt_cache": "generate.prompt_cache",
    "attach": "loading.attach",
    "detach": "loading.attach",
    "warm_up": "loading.warmup",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name in _MLX:
        from mlxkv import startup

        startup.prepare()
    module = import_module(f"{__name__}.{(_MODULES | _MLX)[name]}")
    return module if name == "eval" else getattr(module, name)  # a package that can be called


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
