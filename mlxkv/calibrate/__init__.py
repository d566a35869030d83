"""`mlxkv calibrate`: the command, and its output. What computes lives in `models/calibration`."""
