"""Codes whose bits differ by channel or direction, in plain MLX ops."""
