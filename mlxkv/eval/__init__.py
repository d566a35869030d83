"""Evidence: what a compressed cache costs in quality, measured with the cache in the loop."""
