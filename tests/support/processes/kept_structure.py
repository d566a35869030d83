"""What transformers reads in 3,300 files to know its own models, twice, half of what a process takes to start: here
the first process of a checkout writes it to one file, which all later ones read.
"""

import functools
import os
import pickle
from importlib.machinery import PathFinder
from pathlib import Path

KEPT = Path(__file__).parents[2] / "data" / ".decoded"


class Kept(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
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
