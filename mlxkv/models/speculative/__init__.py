"""Speculative decoding: a small model drafts tokens, the model verifies them in one step, and its caches take
back what it refuses."""
