"""`mlxkv serve`: an OpenAI-compatible server on mlx-lm's own, with compressed caches."""
