"""Caches of latents (multi-head latent attention): one small vector a token, which is key and value."""
