"""Texts that evaluation and calibration read. No framework: tokenizers are passed in.

corpus    passages written for this project
pydocs    documentation of the running Python
sources   which text a run reads, as tokens
worlds    generated stories, facts and chats, of which the small models of the tests were trained
"""
