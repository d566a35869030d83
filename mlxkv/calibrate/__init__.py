"""`mlxkv calibrate`: the command, its output and publishing. What computes lives in `models/calibration`."""
