"""The law in NumPy float64, one file per method, written from the papers.

Only tests and the golden tensors read it, except `bounds`, which also judges the backends; it imports nothing of
the package, except that `bounds` reads `mlxkv.formats`.
"""
