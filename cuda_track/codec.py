"""A side at work: its transform and its quantizer, for heads of one size."""

from __future__ import annotations

from functools import cache

import torch

from cuda_track import transform
from cuda_track.quantizers import QUANTIZERS
from cuda_track.transform import Transform
from mlxkv.config import Side

Stored = dict[str, torch.Tensor]


class Codec:
    """Encodes and reads pages of vectors of `dims` values.

    side: what to do. dims: head dim D of the vectors; then the stored dims R. page: tokens per page.
    rotation: the transform of a calibrated side, which belongs to one layer.
    """

    def __init__(
        self,
        side: Side,
        dims: int,
        page: int,
        rotation: Transform | None = None,
        device: torch.device = torch.device("cpu"),
    ):
        self.spec = side.quantizer
        self.page = page
        self.method = QUANTIZERS[type(side.quantizer)]
        self.transform = rotation or transform.make(side.transform, dims, side.seed, device)
        self.dims = dims if self.transform is None else self.transform.down.shape[-1]

    def __deepcopy__(self, memo) -> Codec:
        return self  # holds no state: copies of a cache share it

    def encode(self, x: torch.Tensor) -> Stored:
        """x: [B, G, T, D], T a whole number of pages -> tensors with tokens (or groups of tokens) on
        axis 2."""
        return self.method.encode(self.spec, self.store(x), self.page)

    def store(self, x: torch.Tensor) -> torch.Tensor:
        """x: [B, G, T, D] -> [B, G, T, R], the values that are quantised."""
        return x if self.transform is None else self.transform.store(x)

    @property
    def turns(self) -> bool:
        """Whether attention may stay in the stored domain: its vectors are as long as the model's. Not
        behind a transform that follows the text: casts of one are kept, and there would be ever more."""
        if self.transform is None:
            return True
        return self.transform.down.ndim < 4 and len(set(self.transform.down.shape[-2:])) == 1

    def decode_stored(self, stored: Stored, dtype: torch.dtype) -> torch.Tensor:
        """Decoded values, not turned back: [B, G, T, R] in `dtype`."""
        return self.method.decode(self.spec, stored, self.dims, self.page, dtype)

    def decode(self, stored: Stored, dtype: torch.dtype) -> torch.Tensor:
        """The vectors that attention sees: [B, G, T, D] in `dtype`."""
        if self.transform is None:
            return self.decode_stored(stored, dtype)
        return self.transform.restore(self.decode_stored(stored, torch.float32)).to(dtype)

    def scores(self, q: torch.Tensor, stored: Stored) -> torch.Tensor:
        """q: [B, G, N, D] -> q . k^ for every stored token: [B, G, N, T] float32."""
        return self.method.scores(self.spec, self.query(q), stored, self.dims, self.page)

    def query(self, q: torch.Tensor) -> torch.Tensor:
        """q: [B, G, N, D] -> float32 queries in the stored domain, [B, G, N, R]."""
        return q.float() if self.transform is None else self.transform.query(q)

    def mix(self, p: torch.Tensor, stored: Stored) -> torch.Tensor:
        """p: [B, G, N, T] -> sum_t p_t v^_t: [B, G, N, D] float32."""
        x = self.method.mix(self.spec, p.float(), stored, self.dims, self.page)
        return x if self.transform is None else self.transform.restore(x)


@cache
def codec(side: Side, dims: int, page: int, device: torch.device) -> Codec:
    """The codec of a side that is not calibrated, shared by all layers."""
    return Codec(side, dims, page, device=device)
