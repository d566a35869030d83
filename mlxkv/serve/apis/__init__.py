"""Adapters for the HTTP APIs: parse their requests into `Request`, write mlx-lm's tokens as their replies."""
