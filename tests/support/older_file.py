"""A calibration as files of earlier versions hold it."""

import dataclasses

from mlxkv.formats.calibration import artifact


def older(made, part: str = "balance"):
    """Return the same without one part of its sides: "balance" (format 1), "mean" or "peaks"."""
    layers = {
        name: dataclasses.replace(
            layer,
            **{s: dataclasses.replace(getattr(layer, s), **{part: None}) for s in artifact.SIDES},
        )
        for name, layer in made.layers.items()
    }
    return dataclasses.replace(made, layers=layers)
