"""The second track: mlxkv's formats in torch and Triton, for models of transformers.

It imports no MLX. Of mlxkv it reads formats, spec.bounds and spec.rows, models.catalog and models.reports, corpora,
files, errors and console, nothing else.
"""
