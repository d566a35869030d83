"""Observe and replace parts of a model of mlx-lm: its caches, its attention, its weights, its decode steps.

Only this folder changes models; it does not decide what a command does. Private parts of mlx-lm are used only in
`mlx_lm_compat`.
"""
