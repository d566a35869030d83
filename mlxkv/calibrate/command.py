"""The command `mlxkv calibrate`. Imports nothing heavy until it runs."""

from __future__ import annotations

import inspect

from mlxkv.calibrate.options import CalibrateOptions


def calibrate(**options) -> None:
    """Fit the transforms of the oscar and balanced presets to a model: one pass over a little text."""
    from mlxkv.calibrate.run import run

    run(CalibrateOptions(**options))


# typer reads the options from the signature.
calibrate.__signature__ = inspect.signature(CalibrateOptions, eval_str=True).replace(
    return_annotation=None
)
