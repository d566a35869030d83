"""`mlxkv bench load` and `bench reuse`: `mlxkv serve` in its own process, seen by its clients. No framework."""
