"""`mlxkv serve`: mlx-lm's server with compressed caches. Here: the command, the generation thread and
its ranks; what a client sends and reads is in `http`, what outlives a request in `caches`."""
