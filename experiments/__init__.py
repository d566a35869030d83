"""Experiments that made the tables and figures of docs/ (README.md here lists them).

Run them from a checkout; they are not in the wheel. They may import everything, and nothing in
mlxkv or cuda_track imports them.
"""

from mlxkv import startup

startup.prepare()  # before MLX is imported
