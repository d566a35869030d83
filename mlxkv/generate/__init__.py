"""Prompts, generation, stop words, roles, saved caches and memory in use."""
