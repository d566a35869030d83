"""Caches: sink | pages | recent, and attention over them.

`view` defines the input of attention, `attention` computes it; `stores` and `pages` hold quantized pages. `choose`
selects kernels, after `selftest` has tested them. `compressed` is the cache of one sequence, `adaptive` one that
observes queries and updates its bases, `latent` one for MLA; `batch` and `batch_buffers` are caches of several
sequences; `static` adapts all of them to steps of fixed shapes.

Views do not know caches, attention checks no types, and modules do not read each other's private members. mlx-lm is
not imported: caches only implement its contract.
"""
