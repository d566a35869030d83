"""One method = one file with `encode`, `decode`, `scores` and `mix`, under the name of its spec in
`config.py`."""

from mlxkv.config import Affine, Codebook, Full, PolarTree
from mlxkv.quantizers import affine, codebook, full, polar_tree

QUANTIZERS = {
    Full: full,
    Affine: affine,
    Codebook: codebook,
    PolarTree: polar_tree,
}
