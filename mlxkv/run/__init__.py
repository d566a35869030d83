"""`mlxkv run`: any program that is built on mlx-lm or mlx-vlm, with compressed caches."""
