"""Models with the shapes of published ones and random weights, for benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cuda_track.cache.compressed import CompressedKVCache
from cuda_track.codec.maps import LayerMaps
from cuda_track.codec.transform import of
from cuda_track.models.layers import CompressedCache, StaticLayer, filled
from cuda_track.models.seam import NAME
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig


@dataclass(frozen=True)
class ModelShape:
    """kind: transformers' name of the architecture. hidden, mlp: widths. heads, kv_heads: of `dims` each."""

    kind: str
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    dims: int
    vocabulary: int
    tied: bool

    @property
    def weights(self) -> int:
        """Weights of all matrices that multiply a token."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.dims
        layer = attention + 3 * self.hidden * self.mlp
        return self.layers * layer + self.hidden * self.vocabulary


# From the config.json of the published models.
SHAPES = {
    "qwen3-4b": ModelShape("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, True),
    "qwen3-8b": ModelShape("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, False),
}


def build(shape: ModelShape, tokens: int, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A model of this shape for contexts of `tokens`; give it caches of `new_cache`."""
    config = AutoConfig.for_model(
        shape.kind,
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.dims,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=tokens,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
    return model.eval()


def new_cache(
    model: PreTrainedModel, shape: ModelShape, config: CacheConfig, tokens: int
) -> CompressedCache:
    """An empty cache with room for `tokens`, static if nothing is compressed.

    Calibrated maps are random rotations, one for each kv head, which take as long as real ones.
    """
    if not config.compresses:
        return CompressedCache(layers=[StaticLayer(tokens) for _ in range(shape.layers)])
    if config.low or config.filled or config.listens:
        raise UserError(
            "[--model-shape] low rank, bits by direction and token selection are not timed here; got a preset "
            "with one of them; choose int4, int3 or int2"
        )
    caches = {}
    for i in range(shape.layers):
        turns = _random_maps(shape).to(model.device) if config.calibrated else None
        caches[i] = CompressedKVCache(config, turns, expected=tokens)
    return filled(model, caches)


def _random_maps(shape: ModelShape) -> LayerMaps:
    def turn():
        down = torch.linalg.qr(torch.randn(shape.kv_heads, shape.dims, shape.dims))[0]
        return of(down, down.mT)

    return LayerMaps(turn(), turn())
