"""Apple's GPUs: mlxkv's Metal kernels through `torch.mps.compile_shader`. Kernel texts are those of
`mlxkv.metal`; none is written here."""
