"""Decode steps that MLX traces once and replays: a token does not wait for Python to build its graph."""
