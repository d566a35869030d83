"""The compressed cache of one layer: windows and quantized pages (compressed, stores, runs), what attention reads
(view) and how (attention, choose), and caches that observe queries (adaptive, following).

Nothing here knows a model; what both tracks decide alike is in `mlxkv.formats`.
"""
