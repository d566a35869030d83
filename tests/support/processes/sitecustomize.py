"""What a Python that a test starts runs first: conftest.py puts this folder in front on PYTHONPATH.

It finds no torch, as on most Macs: transformers, which mlx-lm imports, takes it wherever it is, and that is
most of what such a process would do. With `MLXKV_TEST_TORCH=1` (the fixture `with_torch`) it finds it.
And it multiplies as mlxkv does (mlxkv/blas.py), whether it imports that or not. What transformers would read in
3,300 files to know its own models, twice, half of the rest, is read from one.
"""

import functools
import os
import pickle
import sys
from importlib.machinery import PathFinder
from pathlib import Path

KEPT = Path(__file__).parents[2] / "data" / ".decoded"
TORCH = os.environ.get("MLXKV_TEST_TORCH") == "1"


class Light(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname == "torch" and not TORCH:
            return None
        if fullname == "mlx.core":
            import mlxkv  # noqa: F401
        spec = super().find_spec(fullname, path, target)
        if fullname == "transformers.utils.import_utils":
            keep_structure(spec.loader)
        return spec


def keep_structure(loader):
    """Have the module that this loader makes keep the structure of the folder of all models."""
    load = loader.exec_module

    def exec_module(module):
        load(module)
        make = module.create_import_structure_from_path
        kept = functools.cache(functools.partial(structure, make))

        def of(place):
            folder = Path(place).parent if os.path.isfile(place) else Path(place)
            return kept(folder) if folder.name == "models" else make(place)

        module.create_import_structure_from_path = of

    loader.exec_module = exec_module


def structure(make, folder):
    """Return `make(folder)`, from the file of an earlier process if there is one."""
    file = KEPT / f"transformers-{os.stat(folder).st_mtime_ns}.pickle"
    try:
        return pickle.loads(file.read_bytes())
    except FileNotFoundError:
        made = make(str(folder))
        KEPT.mkdir(exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(made))
        part.replace(file)
        return made


sys.meta_path[sys.meta_path.index(PathFinder)] = Light
