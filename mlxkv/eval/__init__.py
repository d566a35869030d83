"""`mlxkv eval`: measure what a compressed cache costs in quality, with the cache in the loop.

    command, run            the options, and a run of the command; call: from Python
    engine, rows            parts of a run, and their results, computed and stored
    arms                    a model with several caches
    divergence, retrieval   the tasks; questions: documents with facts in them, and questions about these
    report, verdict, plots, intervals   the output of a run

`experiments.evidence` is a second configuration of the same engine. Speed is in `mlxkv.bench`. No other command may
be imported here.
"""

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """This package, which can be called: Python binds its name in `mlxkv`, where it is the function `mlxkv.eval`."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """Call `call.eval`, which needs MLX."""
        from mlxkv import startup

        startup.prepare()
        from mlxkv.eval import call

        return call.eval(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
