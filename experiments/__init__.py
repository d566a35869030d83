"""Experiments that made the tables and figures of docs/ (README.md here lists them).

Run them from a checkout; they are not in the wheel. They may import everything, and nothing in
mlxkv or cuda_track imports them.
"""

import mlxkv  # noqa: F401  before MLX, so that a faster BLAS is in front of it
