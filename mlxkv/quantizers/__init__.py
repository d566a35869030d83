"""One method = one file with `encode`, `decode`, `scores` and `mix`, under the name of its spec in
`config.py`."""

from mlxkv.config import Affine, Codebook, DualScale, Full, Half, Polar, PolarTree
from mlxkv.quantizers import affine, codebook, dual_scale, full, half, polar, polar_tree

QUANTIZERS = {
    Full: full,
    Half: half,
    Affine: affine,
    Codebook: codebook,
    PolarTree: polar_tree,
    DualScale: dual_scale,
    Polar: polar,
}
