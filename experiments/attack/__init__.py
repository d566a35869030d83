"""Attacks on `mlxkv serve` and the commands, on loopback: what a careful operator expects, tried.

Each module that has `attempts` is one area. `python -m experiments.attack` runs them and writes
docs/results/attacks.md.
"""
