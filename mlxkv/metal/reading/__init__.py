"""Kernels that choose which chunks of tokens a step reads."""
