"""A calibration as files of format 1 hold it."""

import dataclasses

from mlxkv.formats.calibration import artifact


def older(made):
    """The same without what format 2 brought."""
    layers = {
        name: dataclasses.replace(
            layer,
            **{s: dataclasses.replace(getattr(layer, s), balance=None) for s in artifact.SIDES},
        )
        for name, layer in made.layers.items()
    }
    return dataclasses.replace(made, layers=layers)
