"""`mlxkv serve`: mlx-lm's batches with compressed caches. Here: the command, the generation thread and its ranks;
HTTP is in `http`, the words of each API in `apis`, what outlives a request in `caches`."""
