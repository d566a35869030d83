"""The second track: mlxkv's formats in torch, Triton and Metal through torch, for models of transformers.

It imports no MLX. Of mlxkv it reads formats, spec.bounds and spec.rows, metal.sources, models.catalog, texts,
errors and console, nothing else.
"""
