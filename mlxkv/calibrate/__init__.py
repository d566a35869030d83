"""`mlxkv calibrate`: the command, and its output. What computes lives in `calibration`."""
