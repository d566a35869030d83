"""The golden table on MLX's default device: the rows of `mlxkv.spec.rows`, and learned maps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import mlx.core as mx
import numpy as np

from mlxkv.cache import adaptive, attention, choose
from mlxkv.cache.view import View
from mlxkv.calibration import learn, moments
from mlxkv.codec import packing, polar_tree, transform
from mlxkv.codec.codec import Codec
from mlxkv.codec.maps import LayerMaps
from mlxkv.codec.transform import KeyMean, Transform
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.records import NAMES
from mlxkv.spec.bounds import BOUNDS, Row, keys, read_golden, rms
from mlxkv.spec.cases import LEARNED_SPEC
from mlxkv.spec.rows import Attention, Table, shared_rows


class MLXTable(Table):
    following = runs = salience = adaptive
    attention, polar_tree, moments = attention, polar_tree, moments
    Transform, LayerMaps, View, codec, float32 = Transform, LayerMaps, View, Codec, mx.float32
    tensor = staticmethod(mx.array)
    transform = staticmethod(transform.make)

    def array(self, tensor: mx.array) -> np.ndarray:
        return np.array(tensor)

    def pack(self, codes: np.ndarray, bits: int) -> mx.array:
        return packing.pack(mx.array(codes), bits)

    def unpack(self, words: mx.array, bits: int, dims: int) -> np.ndarray:
        return np.array(packing.unpack(words, bits, dims))

    def subtract_mean(self, keys: mx.array, mean: mx.array) -> mx.array:
        return KeyMean(mean[:, None]).subtract_from(keys)

    def attend(self, it: Attention) -> mx.array:
        config = CacheConfig(*it.sides, page=it.page)
        store = self.stores(config, it.dims)(it.transforms and LayerMaps(*it.transforms))
        store.restore(dict(zip(NAMES, it.stored, strict=True)), it.pages)
        view = View(it.recent, it.sink, store.read(0, it.pages))
        return attention.attend(it.q, view, it.scale, it.mask, it.sink_logits, it.softcap)

    def causal(self, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        scale = q.shape[-1] ** -0.5
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal")

    def stores(self, config: CacheConfig, dims: int) -> Callable:
        return partial(choose.store, choose.plan(config, (dims, dims), mx.float32))

    @property
    def tables(self):
        return super().tables | {"shared": shared_rows, "learned": self.learned_rows}

    def learned_rows(self) -> Iterator[Row]:
        """Yield maps of given parameters, and the error of codes after them."""
        tensors, _ = read_golden("learned")
        for key in keys(tensors, ".x"):
            variant, base, dims = key.split(".")
            side_transform = transform.make(base, int(dims), 0)
            side_transform = mx.eye(int(dims)) if side_transform is None else side_transform.down
            params = {name: mx.array(tensors[f"{key}.{name}"]) for name in variant.split("+")}
            pair = [np.array(x) for x in learn.pair(params, side_transform)]
            spec = [tensors[f"{key}.{name}"] for name in ("down", "up")]
            error = max(map(rms, pair, spec))
            yield Row("learned", key, spec[0].size, rms=error, bound=BOUNDS["learned"])
            loss = learn.loss(params, mx.array(tensors[f"{key}.x"]), side_transform, LEARNED_SPEC)
            error = rms(np.array(loss), tensors[f"{key}.loss"].mean())
            yield Row("learned", f"{key}, loss", 1, rms=error, bound=BOUNDS["learned"])


TABLE = MLXTable()
