"""Bits by direction: their Triton kernels, and how those are launched."""
