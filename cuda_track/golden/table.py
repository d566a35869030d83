"""The golden table on torch's default device: what `mlxkv.spec.rows` asks of this backend."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from cuda_track.cache import adaptive, choose, following, runs
from cuda_track.cache.attention import attend
from cuda_track.cache.runs import Segments
from cuda_track.cache.view import CodePages, View
from cuda_track.calibrate import grouped, peaks, products
from cuda_track.codec import packing, polar_tree, transform
from cuda_track.codec.codec import Codec
from cuda_track.codec.maps import LayerMaps
from cuda_track.codec.transform import Transform
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.spec.rows import Attention, Stored, Table


class TorchTable(Table):
    following, runs, salience = following, runs, adaptive
    polar_tree = polar_tree

    def tensor(self, x: np.ndarray) -> torch.Tensor:
        x = torch.from_numpy(np.ascontiguousarray(x)).to(torch.get_default_device())
        return packing.from_file(x)

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

    def transform(self, name: str, dims: int, seed: int) -> Transform:
        return transform.make(name, dims, seed, torch.get_default_device())

    def pair(self, down: torch.Tensor, up: torch.Tensor) -> Transform:
        return Transform(down, up)

    def codec(self, side: Side, dims: int, page: int, turn: Transform | None = None) -> Codec:
        return Codec(side, dims, page, turn, torch.get_default_device())

    def decoded(self, code: Codec, stored: Stored) -> np.ndarray:
        return self.array(code.decode_stored(stored, torch.float32))

    def left(self, keys: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        turn = self.transform("none", keys.shape[-1], 0)
        return LayerMaps(turn, turn, mean=mean[:, None]).left(keys)

    def attend(self, it: Attention) -> torch.Tensor:
        return attend(it.q, self.given(it), it.scale, it.mask, it.sink_logits, it.softcap)

    def given(self, it: Attention) -> View:
        """A view whose pages hold the codes of `it`."""
        turns = it.turns or (None, None)
        codecs = (self.codec(s, it.dims, it.page, t) for s, t in zip(it.sides, turns, strict=True))
        return View(it.live, it.sink, CodePages(tuple(codecs), it.stored, it.pages * it.page))

    def causal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def peaks(self, x: torch.Tensor) -> torch.Tensor:
        return peaks(x)

    def moment(self, rows: torch.Tensor, kv_heads: int) -> torch.Tensor:
        rows = grouped(rows, kv_heads)
        return products(rows, torch.zeros(kv_heads, rows.shape[-1], device=rows.device))[0]

    def view(self, live: tuple[torch.Tensor, torch.Tensor], pages=None) -> View:
        return View(live, None, pages)

    def over(self, q: torch.Tensor, view: View, scale: float) -> torch.Tensor:
        return attend(q, view, scale, "causal")

    def segments(
        self, config: CacheConfig, dims: int, turn: Transform, like: torch.Tensor
    ) -> Segments:
        make = partial(choose.store, config, (dims, dims), like.device)
        start = self.rotations(turn)
        return Segments(make, start, start, config.page, config.keys.low)

    def rotations(self, turn: Transform) -> LayerMaps:
        return LayerMaps(turn, turn)


TABLE = TorchTable()
