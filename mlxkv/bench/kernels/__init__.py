"""`mlxkv bench kernels`: attention, encoding and decoding of one cache, with random numbers. No model."""
