"""Encoding, decoding and products with codes in plain MLX ops, for every stored format.

Each method is a file (`affine`, `codebook`, `polar`, `polar_tree`, `raw`) with `encode`, `decode`, `scores` and `mix`.
`codec` combines a method with its `transform`; `maps` has the transforms of a calibration, `packing` packs codes into
words, `records` converts page records that kernels read. Imports no kernels, caches or models.
"""
