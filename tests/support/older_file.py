"""A calibration as files of earlier versions hold it."""

import dataclasses
import json

from safetensors import safe_open
from safetensors.numpy import save

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


def rewritten(path, header=None, drop=(), **tensors):
    """Replace header entries or tensors of a file."""
    with safe_open(path, "numpy") as file:
        old = json.loads(file.metadata()["mlxkv"])
        stored = {n: file.get_tensor(n) for n in file.keys() if n not in drop}  # noqa: SIM118
    path.write_bytes(save(stored | tensors, {"mlxkv": json.dumps({**old, **(header or {})})}))
