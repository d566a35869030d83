"""Every causal language model of transformers, small and random, on compressed caches."""
