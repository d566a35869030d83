"""Local LLMs with a compressed KV cache, on MLX. Importing this brings no framework in: `load`, `attach` and
`detach` of `mlxkv.models` do when they are first asked for."""

import sys

__version__ = "0.1.0"
__all__ = ["attach", "detach", "load"]

if sys.platform == "linux":
    try:
        from mlxkv import blas

        blas.put_in_front()
    except KeyboardInterrupt:
        # Ctrl-C as a command starts: `mlxkv`, or Python with -m, which imports this before the module.
        if sys.argv[0] == "-m" or sys.argv[0].endswith("/mlxkv"):
            sys.exit(130)
        raise


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("mlxkv.models"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
