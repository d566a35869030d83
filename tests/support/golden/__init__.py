"""The tables of golden tensors that `make_golden.py` makes, by what they are of."""
