"""One method = one file with `encode`, `decode`, `scores` and `mix`, under the name of its spec in
`config.py`."""

from mlxkv.config import Affine, DualScale, Full, Polar
from mlxkv.quantizers import affine, dual_scale, full, polar

QUANTIZERS = {Full: full, Affine: affine, DualScale: dual_scale, Polar: polar}
