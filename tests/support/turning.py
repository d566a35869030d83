"""Keys of a random llama of 64 dims at position 0, and moments over positions, by the spec and the formula of RoPE."""

import numpy as np

from mlxkv.spec import positions

DIMS, CONTEXT = 64, 1 << 15  # the context of a model that does not say
PAIRS, FREQUENCIES = positions.rotary_pairs(DIMS), 1e4 ** (-np.arange(0, DIMS, 2) / DIMS)
ROTARY = PAIRS, FREQUENCIES


def at_zero(x):
    """x [..., N, D] of positions 0 to N - 1, turned back."""
    return positions.turned(x, -np.arange(x.shape[-2]), *ROTARY)


def moments_over(moments, longest=CONTEXT):
    """[G, D, D] at position 0, over positions 0 to longest - 1."""
    return np.stack([positions.moment_over(one, (0, longest), *ROTARY) for one in moments])


def means_over(means, longest=CONTEXT):
    return np.stack([positions.mean_over(one, (0, longest), *ROTARY) for one in means])
