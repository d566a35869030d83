"""Texts that evaluation and calibration read. No framework: tokenizers are passed in.

corpus    passages written for this project
sources   which text a run reads, as tokens
"""
