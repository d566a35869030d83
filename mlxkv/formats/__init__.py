"""What is stored, as frozen data and NumPy: quantizers, cache configs, page records, files of
calibrations, caches and sessions.

Both tracks read this package; it imports no framework and nothing above `mlxkv.errors` and `mlxkv.console`.
"""
