"""The only code that touches transformers: loading, attaching, cache layers, saved sessions, observing attention.

Caches and kernels are below and know no model.
"""
