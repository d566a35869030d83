"""One method = one file with `encode`, `decode`, `scores` and `mix`, under the name of its spec in
`mlxkv.config`."""

from cuda_track.quantizers import affine, codebook, dual_scale, full, half, polar, polar_tree
from mlxkv.config import Affine, Codebook, DualScale, Full, Half, Polar, PolarTree

QUANTIZERS = {
    Full: full,
    Half: half,
    Affine: affine,
    Codebook: codebook,
    PolarTree: polar_tree,
    DualScale: dual_scale,
    Polar: polar,
}
