"""The golden table on MLX's default device: what `mlxkv.spec.rows` asks of this backend, and learned maps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
import numpy as np

from mlxkv.cache import adaptive, choose
from mlxkv.cache.adaptive import Segments
from mlxkv.cache.attention import attend
from mlxkv.cache.view import View
from mlxkv.codec import packing, polar_tree, transform
from mlxkv.codec.codec import Codec
from mlxkv.codec.maps import LayerMaps
from mlxkv.codec.transform import Centre, Transform
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.records import NAMES
from mlxkv.models.calibration import learn
from mlxkv.models.calibration.moments import grouped, peaks, products
from mlxkv.spec.bounds import BOUNDS, LEARNED_SPEC, Row, keys, read, rms
from mlxkv.spec.rows import Attention, Stored, Table, shared_rows


class MLXTable(Table):
    following = runs = salience = adaptive
    polar_tree = polar_tree

    def tensor(self, x: np.ndarray) -> mx.array:
        return mx.array(x)

    def array(self, x: mx.array) -> np.ndarray:
        return np.array(x)

    def pack(self, codes: np.ndarray, bits: int) -> mx.array:
        return packing.pack(mx.array(codes), bits)

    def unpack(self, words: mx.array, bits: int, dims: int) -> np.ndarray:
        return np.array(packing.unpack(words, bits, dims))

    def transform(self, name: str, dims: int, seed: int) -> Transform:
        return transform.make(name, dims, seed)

    def pair(self, down: mx.array, up: mx.array) -> Transform:
        return Transform(down, up)

    def codec(self, side: Side, dims: int, page: int, turn: Transform | None = None) -> Codec:
        return Codec(side, dims, page, turn)

    def decoded(self, code: Codec, stored: Stored) -> np.ndarray:
        return np.array(code.decode_stored(stored, mx.float32))

    def left(self, keys: mx.array, mean: mx.array) -> mx.array:
        return Centre(mean[:, None]).left(keys)

    def attend(self, it: Attention) -> mx.array:
        config = CacheConfig(*it.sides, page=it.page)
        turns = it.turns and LayerMaps(*it.turns)
        store = choose.store(choose.plan(config, (it.dims, it.dims), mx.float32), turns)
        store.restore(dict(zip(NAMES, it.stored, strict=True)), it.pages)
        view = View(it.live, it.sink, store.read(0, it.pages))
        return attend(it.q, view, it.scale, it.mask, it.sink_logits, it.softcap)

    def causal(self, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        scale = q.shape[-1] ** -0.5
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal")

    def peaks(self, x: mx.array) -> mx.array:
        return peaks(x)

    def moment(self, rows: mx.array, kv_heads: int) -> mx.array:
        rows = grouped(rows, kv_heads)
        return products(rows, mx.zeros((kv_heads, rows.shape[-1])))[0]

    def view(self, live: tuple[mx.array, mx.array], pages=None) -> View:
        return View(live, None, pages)

    def over(self, q: mx.array, view: View, scale: float) -> mx.array:
        return attend(q, view, scale, "causal")

    def segments(self, config: CacheConfig, dims: int, turn: Transform, like: mx.array) -> Segments:
        make = partial(choose.store, choose.plan(config, (dims, dims), mx.float32))
        start = self.rotations(turn)
        return Segments(make, start, start, config.page, config.keys.low)

    def rotations(self, turn: Transform) -> LayerMaps:
        return LayerMaps(turn, turn)

    @property
    def tables(self):
        return (*super().tables, shared_rows, self.learned_rows)

    def learned_rows(self) -> Iterator[Row]:
        """Maps of given parameters, and what codes behind them lose."""
        tensors, _ = read("learned")
        for key in keys(tensors, ".x"):
            variant, base, dims = key.split(".")
            turn = transform.make(base, int(dims), 0)
            turn = mx.eye(int(dims)) if turn is None else turn.down
            params = {name: mx.array(tensors[f"{key}.{name}"]) for name in variant.split("+")}
            pair = [np.array(x) for x in learn.pair(params, turn)]
            spec = [tensors[f"{key}.{name}"] for name in ("down", "up")]
            error = max(map(rms, pair, spec))
            yield Row("learned", key, spec[0].size, rms=error, bound=BOUNDS["learned"])
            loss = learn.loss(params, mx.array(tensors[f"{key}.x"]), turn, LEARNED_SPEC)
            error = rms(np.array(loss), tensors[f"{key}.loss"].mean())
            yield Row("learned", f"{key}, loss", 1, rms=error, bound=BOUNDS["learned"])


TABLE = MLXTable()
