"""Imported by every Python that `mlxkv run` starts, and by those that these start: waits for mlx-lm and mlx-vlm.

The environment may have no mlxkv, so the file is found by its place. A `sitecustomize` that this one hides
is run as well.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
WATCH = os.path.join(HERE, os.pardir, os.pardir, "models", "hosts", "watch.py")


def _load(name, spec):
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _watch():
    from importlib.util import spec_from_file_location

    name = "_mlxkv_watch"
    _load(name, spec_from_file_location(name, os.path.normpath(WATCH))).start()


def _hidden():
    """The sitecustomize that Python would have imported."""
    from importlib.machinery import PathFinder

    places = [place for place in sys.path if os.path.abspath(place or os.curdir) != HERE]
    spec = PathFinder.find_spec("sitecustomize", places)
    if spec is not None and spec.loader is not None:
        _load("sitecustomize", spec)


if os.environ.get("MLXKV"):
    try:
        _watch()
    except Exception as error:
        text = " ".join(str(error).split())
        print(f"[mlxkv] no hook: {type(error).__name__}: {text}", file=sys.stderr)
_hidden()
