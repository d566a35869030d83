"""The formats in torch ops: one method, one file, with `encode` and `decode`; no kernels and no caches.

Codes, transforms and calibrated maps of both tracks are described in `mlxkv.formats`.
"""
