"""The stored formats in kernels, for Metal and CUDA.

`text/` has the texts, `sources` finds them, `launch` builds and runs them for a backend (`gpu` knows
its size). `quantize` encodes pages, `attend` and `tiles` read them, `whiten` replaces single
steps of plain ops; `template` is what they share. `trust` keeps notes of kernels that failed on a Mac.

Arrays come in and go out: no cache and no model is known here, and no kernel is chosen
(`mlxkv.cache.choose` does). `sources` imports no framework: the torch track reads it.
"""
