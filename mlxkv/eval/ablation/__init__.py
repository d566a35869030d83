"""The evidence for OSCAR, on the models that come with mlxkv: `python -m mlxkv.eval.ablation WHAT`.

parts: the paper's ablation: full, and one thing at a time left out of the rotations; the same of
    balanced transforms.
domains: calibrated on one kind of text, judged on another; --recipe balanced: those transforms.
windows: how many tokens to keep in full precision, at the start and at the end.
search: candidates for the best preset of each width: transforms, codes, groups, clips, keys against
    values, protected layers.
bits: bits per value by context, of allocated bytes, beside the formula.
"""
