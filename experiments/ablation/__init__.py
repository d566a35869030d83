"""Ablations of calibrated transforms on the embedded models: `python -m experiments.ablation WHAT`.

parts     the OSCAR paper's ablation: the full rotation and one thing at a time left out of it;
          the same for balanced transforms
domains   calibrate on one kind of text and judge on another (--recipe balanced: those transforms)
windows   how many tokens at the start and at the end to keep in full precision
search    candidates for the best preset of each width: transforms, codes, groups, clips, keys
          against values, protected layers
bits      bits per value by context, of allocated bytes, beside the formula
"""
