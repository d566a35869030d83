"""Whole models by replayed decode steps."""
