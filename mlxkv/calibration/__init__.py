"""Fit transforms to a model: `measure` computes a calibration, `clips` and `learn` refine one, `fitting`
finds the one that a model uses. The file format is in `formats/calibration`, the command in
`calibrate/`."""

TOKENS = 8900  # read by default, about as many as in the OSCAR paper
