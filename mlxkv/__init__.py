"""Local LLMs with a compressed KV cache, on MLX. Importing this brings no framework in."""

__version__ = "0.1.0"
