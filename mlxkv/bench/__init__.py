"""`mlxkv bench`: speed and memory of the kernels alone (`kernels`) and of a whole model (`decode`, `steps`).

No other command may be imported here.
"""
