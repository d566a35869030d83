"""Models of mlx-vlm, for prompts with images. mlx-vlm is optional (`pip install "mlxkv[vlm]"`); nothing here
imports it before a model is loaded by it."""
