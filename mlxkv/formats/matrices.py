"""Matrices that mix the dims of a head, and calibrated rotations made from them.

NumPy float64, so that every backend makes the same rotation from the same calibration. Spec:
`mlxkv.spec.affine`, `mlxkv.spec.oscar`. Letters: `G` kv heads, `D` head dim.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from mlxkv.errors import UserError


def _splitmix(count: int, seed: int) -> np.ndarray:
    """Return [count] uint64: positions 1 .. count of stream `seed` of splitmix64."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed << 32) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def signs(dims: int, seed: int) -> np.ndarray:
    """Return [D] of +-1, the lowest bits of splitmix64."""
    return 1.0 - 2.0 * (_splitmix(dims, seed) & np.uint64(1)).astype(np.float64)


def gaussian(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return standard normal numbers that no version of NumPy changes: saved caches depend on them. Spec:
    `mlxkv.spec.codebook.gaussian`."""
    count = int(np.prod(shape))
    bits = _splitmix(count + count % 2, seed) >> np.uint64(11)
    uniform = ((bits.astype(np.float64) + 0.5) * 2.0**-53).reshape(-1, 2)
    radius, angle = np.sqrt(-2 * np.log(uniform[:, 0])), 2 * np.pi * uniform[:, 1]
    out = np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1).ravel()
    return out[:count].reshape(shape)


def random(dims: int, seed: int) -> np.ndarray:
    """Return a uniformly distributed orthogonal matrix [D, D]. Spec: `mlxkv.spec.codebook.random_rotation`."""
    q, r = np.linalg.qr(gaussian((dims, dims), seed))
    return q * np.sign(np.diagonal(r))


def hadamard(dims: int) -> np.ndarray:
    """Return [D, D], D a power of two: entry (i, j) is (-1)^popcount(i & j) / sqrt(D)."""
    i = np.arange(dims)
    parity = np.array([bin(n).count("1") & 1 for n in range(dims)])
    return (1.0 - 2.0 * parity[i[:, None] & i[None]]) / np.sqrt(dims)


def fourier(dims: int) -> np.ndarray:
    """Return [D, D], D even, orthonormal: columns DC, Nyquist, then sqrt(2) (cos, -sin) per bin."""
    i = np.arange(dims)[:, None]
    angle = 2 * np.pi * ((i * np.arange(1, dims // 2)[None]) % dims) / dims
    out = np.empty((dims, dims))
    out[:, 0], out[:, 1] = 1.0, 1.0 - 2.0 * (i[:, 0] & 1)
    out[:, 2::2], out[:, 3::2] = np.sqrt(2) * np.cos(angle), -np.sqrt(2) * np.sin(angle)
    return out / np.sqrt(dims)


def srft(dims: int, seed: int = 0) -> np.ndarray:
    """Return the sign-randomised `fourier` [D, D]. Spec: `mlxkv.spec.affine.srft`."""
    return signs(dims, seed)[:, None] * fourier(dims)


def eigenbasis(moments: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Decompose symmetric [G, D, D] into eigenvalues [G, D], ascending, and eigenvectors [G, D, D], one per
    column. The third result counts the eigenvalues below float32 resolution, which are raised to a floor."""
    values, vectors = np.linalg.eigh((moments + moments.swapaxes(-1, -2)) / 2)
    top = np.abs(vectors).argmax(-2)[:, None]
    vectors = vectors * np.sign(np.take_along_axis(vectors, top, -2))
    resolution = np.finfo(np.float32)  # parts of a moment are summed in float32
    floor = np.maximum(values[:, -1:] * 8 * resolution.eps, resolution.tiny)
    return np.maximum(values, floor), vectors, int((values < floor).sum())


def random_basis(heads: int, dims: int, seed: int = 0) -> np.ndarray:
    """Return uniformly distributed orthogonal matrices [G, D, D]."""
    x = np.random.default_rng(seed).standard_normal((heads, dims, dims))
    q, r = np.linalg.qr(x)
    return q * np.sign(np.diagonal(r, axis1=-2, axis2=-1))[:, None]


def compose(vectors: np.ndarray) -> np.ndarray:
    """Return R = U H P [G, D, D] (OSCAR, section 3) from eigenvectors U [G, D, D] by ascending eigenvalue."""
    return vectors @ ordered(vectors.shape[-1])


def ordered(dims: int) -> np.ndarray:
    """Return H P [D, D]: row i is the i-th Walsh function, fewest sign changes first.

    For D = a b, a a power of two and b odd: Walsh functions inside blocks of a dims, real waves over the b
    blocks.
    """
    a = dims & -dims
    b = dims // a
    walsh = hadamard(a)[:, _bit_reversed(a)]
    angle = 2 * np.pi * np.arange(b)[:, None] * np.arange(b)[None] / b
    waves = np.full((b, b), 1 / np.sqrt(b))
    waves[1::2] = np.sqrt(2 / b) * np.cos(angle[1 : b // 2 + 1])
    waves[2::2] = np.sqrt(2 / b) * np.sin(angle[1 : b // 2 + 1])
    return np.einsum("hj,lk->hlkj", walsh, waves).reshape(dims, dims)


def _bit_reversed(dims: int) -> np.ndarray:
    order, step = np.zeros(1, np.int64), dims
    while step > 1:
        step //= 2
        order = np.concatenate([order, order + step])
    return dims - 1 - order


def off_orthonormal(vectors: ArrayLike) -> float:
    """Return the largest entry of |U^T U - I|, in float64, of an array of any framework."""
    x = np.array(vectors, np.float64)
    return float(np.abs(x.swapaxes(-1, -2) @ x - np.eye(x.shape[-1])).max())


# Transforms that need no calibration.
COMPUTED = ("hadamard", "srft", "random")


def computed(name: str, dims: int) -> str:
    """Return the name of a transform that is computed.

    Raises UserError for a transform whose matrices come from a calibration.
    """
    if name not in COMPUTED:
        raise UserError(
            f"[transform] {name} needs the rotations of a calibration; got none; choose "
            f"{', '.join(COMPUTED)}, or attach the preset to a model"
        )
    return name
