"""The classes of mlx-lm's model files, without what its package imports besides: transformers alone takes seconds."""

from __future__ import annotations

import ast
import sys
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import ModuleType

PACKAGE = "mlx_lm"
TABLES = (
    "MODEL_REMAPPING",
    "MODEL_ARCHITECTURE_REMAPPING",
)  # of its `utils`: types that share a file


class NotBuilt(Exception):
    """Why mlx-lm makes no model of a config.json."""


class _Package(ModuleType):
    """mlx-lm's package, whose own code runs when a name of it is asked for that no submodule has."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        self.__class__ = ModuleType
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def light() -> None:
    """Let submodules of mlx-lm be imported before its package's own code runs; nothing where that has run."""
    if PACKAGE not in sys.modules:
        spec = find_spec(PACKAGE)
        package = sys.modules[PACKAGE] = _Package(PACKAGE)
        package.__spec__, package.__file__ = spec, spec.origin
        package.__package__, package.__path__ = PACKAGE, list(spec.submodule_search_locations)


def classes_of(config: dict) -> tuple[type, type]:
    """The classes of a model and of its arguments, as mlx-lm chooses them. Raises NotBuilt."""
    light()
    kind = _file_of(config)
    folder = Path(find_spec(PACKAGE).origin).parent / "models"
    if kind not in {file.stem for file in folder.glob("*.py")}:
        raise NotBuilt(f"mlx-lm knows no model of type {str(config.get('model_type'))[:40]!r}")
    try:
        with redirect_stdout(StringIO()):
            file = import_module(f"{PACKAGE}.models.{kind}")
        return file.Model, file.ModelArgs
    except (Exception, SystemExit) as error:  # a file that asks for another package leaves Python
        raise NotBuilt(f"mlx-lm's {kind} cannot be used here ({type(error).__name__})") from None


def _file_of(config: dict) -> str:
    """The stem of the file that reads a model type."""
    kind, named = str(config.get("model_type")), config.get("architectures") or ()
    tree = ast.parse(Path(find_spec(f"{PACKAGE}.utils").origin).read_text(encoding="utf-8"))
    kinds, pairs = {}, {}
    for line in tree.body:
        if isinstance(line, ast.Assign) and getattr(line.targets[0], "id", None) in TABLES:
            table = ast.literal_eval(line.value)
            kinds, pairs = (table, pairs) if line.targets[0].id == TABLES[0] else (kinds, table)
    named = [named] if isinstance(named, str) else named
    chosen = (pairs[kind, one] for one in map(str, named) if (kind, one) in pairs)
    return next(chosen, kinds.get(kind, kind))
