"""Kernels compiled for Apple's GPUs by Mesa's compiler: compiler.py; `make agx` builds it."""
