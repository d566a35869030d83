"""Kernels for the stored formats, on Metal and CUDA.

`text/` contains the kernel sources, `sources` reads them, `launch` builds and runs them for a backend, `gpu` describes
the GPU. `quantize` encodes pages, `attend` and `tiles` read them, `whiten` replaces single steps of plain ops;
`template` has the template values that they share. `trust` records kernels that failed on a Mac.

Functions map arrays to arrays and know no cache or model; `mlxkv.cache.choose` selects kernels. `sources` imports no
framework, since the torch track reads it.
"""
