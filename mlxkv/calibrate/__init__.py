"""`mlxkv calibrate`: the command and its output. The computation is in `calibration`."""
