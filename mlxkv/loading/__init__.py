"""Load a model, check it, and attach a compressed cache to it."""
