"""The only code that touches transformers: loading, attaching, layers, prompt caches."""
