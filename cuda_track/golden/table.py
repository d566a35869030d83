"""The golden table on torch's default device: what `mlxkv.spec.rows` asks of this backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from cuda_track import calibrate
from cuda_track.cache import adaptive, attention, choose, following, runs
from cuda_track.cache.view import CodePages, View
from cuda_track.codec import packing, polar_tree, transform
from cuda_track.codec.codec import Codec
from cuda_track.codec.maps import LayerMaps
from cuda_track.codec.transform import Transform
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.spec.rows import Attention, Table


class TorchTable(Table):
    following, runs, salience = following, runs, adaptive
    attention, polar_tree, moments = attention, polar_tree, calibrate
    Transform, LayerMaps, View, float32 = Transform, LayerMaps, View, torch.float32

    def tensor(self, x: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(x)).to(torch.get_default_device())
        return packing.from_file(tensor)

    def array(self, x: torch.Tensor) -> np.ndarray:
        return x.cpu().numpy()

    def indices(self, x: np.ndarray) -> torch.Tensor:
        return self.tensor(x).long()

    def pack(self, codes: np.ndarray, bits: int) -> torch.Tensor:
        return packing.pack(self.tensor(codes), bits)

    def unpack(self, words: torch.Tensor, bits: int, dims: int) -> np.ndarray:
        return self.array(packing.unpack(words, bits, dims))

    def words(self, words: torch.Tensor) -> np.ndarray:
        return self.array(packing.as_file(words))

    def transform(self, name: str, dims: int, seed: int) -> Transform | None:
        return transform.make(name, dims, seed, torch.get_default_device())

    def codec(self, side: Side, dims: int, page: int, transform: Transform | None = None) -> Codec:
        return Codec(side, dims, page, transform, torch.get_default_device())

    def subtract_mean(self, keys: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        same = Transform(eye := torch.eye(keys.shape[-1]), eye)
        return LayerMaps(same, same, mean=mean[:, None]).subtract_mean(keys)

    def attend(self, it: Attention) -> torch.Tensor:
        return attention.attend(it.q, self.given(it), it.scale, it.mask, it.sink_logits, it.softcap)

    def given(self, it: Attention) -> View:
        """Return a view whose pages hold the codes of `it`."""
        return View(it.recent, it.sink, CodePages(self.codecs(it), it.stored, it.pages * it.page))

    def codecs(self, it: Attention) -> tuple[Codec, Codec]:
        pairs = zip(it.sides, it.transforms or (None, None), strict=True)
        keys, values = (self.codec(side, it.dims, it.page, pair) for side, pair in pairs)
        return keys, values

    def causal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def stores(self, config: CacheConfig, dims: int) -> Callable:
        return partial(choose.store, config, (dims, dims), torch.get_default_device())


TABLE = TorchTable()
