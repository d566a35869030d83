"""Speed: of the kernels alone, and of a whole model."""
