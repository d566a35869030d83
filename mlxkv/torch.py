"""Compressed caches for transformers' models, in torch and Triton, without MLX: `from mlxkv.torch import attach`.

The code lives in `cuda_track`, the second implementation of mlxkv's formats.
"""

from cuda_track.models.attach_model import attach, compressed_from, detach, new_cache
from cuda_track.models.loader import load
from cuda_track.models.transformers_compat import cache_of, handed

__all__ = ["attach", "cache_of", "compressed_from", "detach", "handed", "load", "new_cache"]
