"""`mlxkv launch`: a coding agent with a server of ours behind it."""
