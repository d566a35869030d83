"""Trees of arrays from MLX to torch and back, bit for bit."""

import mlx.core as mx
import numpy as np
import torch

from cuda_track.codec import packing


def to_torch(tree):
    if isinstance(tree, dict):
        return {name: to_torch(x) for name, x in tree.items()}
    return packing.from_file(torch.from_numpy(np.array(tree)))


def to_mlx(tree):
    if isinstance(tree, dict):
        return {name: to_mlx(x) for name, x in tree.items()}
    return mx.array(packing.as_file(tree).numpy())
