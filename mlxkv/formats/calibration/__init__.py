"""Calibration files and the transforms in them, as frozen data and NumPy float64.

Measuring and learning need a framework and live in `mlxkv.calibration` and `mlxkv.calibrate`.
"""
