"""The formats in torch ops: one method, one file, with `encode` and `decode`; no kernels and no caches.

Codes, transforms and calibrated maps of both tracks are described in `mlxkv.formats`.
"""

from cuda_track.codec import affine, codebook, fill, polar, polar_tree, raw
from mlxkv.formats.config import Affine, Codebook, Fill, Full, Half, Polar, PolarTree

METHODS = {
    Full: raw,
    Half: raw,
    Affine: affine,
    Codebook: codebook,
    PolarTree: polar_tree,
    Polar: polar,
    Fill: fill,
}
