"""`mlxkv bench`: speed and memory, of the kernels alone, of a whole model, and of a server.

What two of these folders need lies here; the folders import nothing of each other.
"""
