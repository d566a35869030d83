"""Triton kernels, their launches, the order of codes that they read and the pool of pages they write to.

Only the kernels' own modules import triton, and only when one is launched.
"""
