"""Build a model from a checked folder: its weights, and its share of them in each of several processes."""
