"""`mlxkv serve`: mlx-lm's batches with compressed caches. This package has the command, the generation thread,
its ranks and the stored sessions; `http` has the HTTP server, `apis` the API formats."""
