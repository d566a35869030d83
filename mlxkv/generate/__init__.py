"""Prompts, replies and what they leave behind: generation, stop words, roles, saved caches, memory in use."""
