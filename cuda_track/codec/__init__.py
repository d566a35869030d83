"""The formats in torch ops: one method, one file, with `encode` and `decode`; no kernels and no caches.

Codes, transforms and calibrated maps of both tracks are described in `mlxkv.formats`.
"""

from cuda_track.codec import affine, codebook, dual_scale, fill, kitty, polar, polar_tree, raw
from mlxkv.formats.config import (
    Affine,
    Codebook,
    DualScale,
    Fill,
    Full,
    Half,
    Kitty,
    Polar,
    PolarTree,
)

METHODS = {
    Full: raw,
    Half: raw,
    Affine: affine,
    Codebook: codebook,
    PolarTree: polar_tree,
    DualScale: dual_scale,
    Polar: polar,
    Kitty: kitty,
    Fill: fill,
}
