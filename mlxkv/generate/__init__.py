"""Prompts, generation, reading, stop words, roles, saved caches and memory in use."""
