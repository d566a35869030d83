"""The second implementation of mlxkv's formats, in torch and Triton; no MLX."""
