"""Observe and replace parts of a model of mlx-lm: its caches, its attention, its weights, its decode steps.

Nothing here decides what a command does, and nothing else changes a model. No other file knows what is private to
mlx-lm (`mlx_lm_compat`).
"""
