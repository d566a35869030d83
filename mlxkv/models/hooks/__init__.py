"""Observers and replacements of parts of an mlx-lm model: its caches, its attention function, its weights.
Nothing here decides what a command does, and nothing else changes a model."""
