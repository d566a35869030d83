"""What a Python that a test starts runs first: conftest.py puts this folder in front on PYTHONPATH.

It finds no torch, as on most Macs: transformers, which mlx-lm imports, takes it wherever it is, and that is
most of what such a process would do. With `MLXKV_TEST_TORCH=1` (the fixture `with_torch`) it finds it.
And it is prepared as mlxkv is (mlxkv/startup.py), whether it imports that or not.
"""

import os
import sys
from importlib.machinery import PathFinder

from kept_structure import Kept

TORCH = os.environ.get("MLXKV_TEST_TORCH") == "1"


class Light(Kept):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname == "torch" and not TORCH:
            return None
        if fullname == "mlx.core":
            from mlxkv import startup

            startup.prepare()
        return super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Light
