"""The golden table by torch, Triton and Metal, and the page that puts every backend side by side.

Cases, comparisons and bounds are those of `mlxkv.spec`; nothing here is read by the rest of cuda_track.
"""
