"""The stored formats in plain MLX ops: encoding, decoding, and products with codes.

One method, one file (`affine`, `codebook`, `polar`, `polar_tree`, `raw`) with
`encode`, `decode`, `scores` and `mix`. `codec` joins a method with its `transform`; `maps` has the
transforms of a calibration, `packing` codes in words, `records` the page records that kernels read. No kernel, no
cache and no model is known here.
"""
