"""Calibrations, and their files, that no model was read for."""

import json

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from mlxkv.formats import matrices
from mlxkv.formats.calibration.artifact import Basis
from mlxkv.formats.calibration.balance import Balance


def basis(heads: int, dims: int, seed: int, clips=None, keys: bool = True) -> Basis:
    """Return random rotations of a side, and maps that change nothing."""
    values = np.sort(np.random.default_rng(seed).random((heads, dims)) + 0.1).astype(np.float32)
    vectors = matrices.random_basis(heads, dims, seed).astype(np.float32)
    ones = np.ones((heads, dims), np.float32)
    return Basis(
        values, vectors, Balance(vectors, ones), ones, seed, clips or {}, ones if keys else None
    )


def rewritten(path, header=None, drop=(), **tensors):
    """Replace header entries or tensors of a file."""
    with safe_open(path, "numpy") as file:
        old = json.loads(file.metadata()["mlxkv"])
        stored = {n: file.get_tensor(n) for n in file.keys() if n not in drop}  # noqa: SIM118
    path.write_bytes(save(stored | tensors, {"mlxkv": json.dumps({**old, **(header or {})})}))
