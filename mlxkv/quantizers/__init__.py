"""One method = one file with `encode`, `decode`, `scores` and `mix`, under the name of its spec in
`config.py`."""

from mlxkv.config import Affine, Full
from mlxkv.quantizers import affine, full

QUANTIZERS = {Full: full, Affine: affine}
