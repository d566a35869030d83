"""A Python that finds no torch, as on most Macs: transformers, which mlx-lm imports, takes it wherever it
is, and that is most of what a process of a test would do. In front on PYTHONPATH: see conftest.py."""

import sys
from importlib.machinery import PathFinder


class WithoutTorch(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname == "torch" else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTorch
