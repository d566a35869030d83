"""What becomes of weights while a model is loaded: codes are decoded, outliers planted. No framework is imported."""
