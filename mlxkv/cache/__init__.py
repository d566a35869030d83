"""Caches: sink | pages | recent, and attention over them.

`view` has what attention reads, `attention` computes it; `stores` and `pages` hold quantized pages.
`choose` says which kernels run, after `selftest` has tried them. `compressed` is the cache of one
sequence, `adaptive` one that observes queries and whose bases learn,
`latent` one of MLA; `batch` and `batch_buffers` are caches of several sequences; `static` has all of them in
steps of fixed shapes.

Views know no cache, attention asks for no types, and a module reads no private members of a class of
another one. Nothing of mlx-lm is imported here: caches only speak its contract.
"""
