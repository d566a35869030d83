"""torch on Apple's GPUs: mlxkv's Metal kernels, by `torch.mps.compile_shader`."""
