"""What reads the latents of a layer with MLA: the queries that meet them, and the map that makes values of them.

A latent is key and value at once, so one map serves both: what reads it is a sum of two second moments. To first
order an error e of a latent moves the output of head h by p (scale q . e) W (c - mean) + p W e, where p is the weight
of its token, q the absorbed query and W the map from latents to values. Its mean square, less p^2, is e^T M e with

    M = sum over heads of  scale^2 tr(W C W^T) E[q q^T] + W^T W

and C the covariance of latents. Spec: `spec.affine.latent_readers`. Letters: `R` latent dims, `D` dims of a head
without positions, `Dv` of its values.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np


class Readers:
    """What reads the latents of one layer. module: its attention."""

    def __init__(self, module: nn.Module, rank: int):
        self.module, self.rank = module, rank
        self._spread: mx.array | None = None  # [H], the root of the trace, from the first tokens on

    def rows(self, queries: mx.array, scale: float, covariance: np.ndarray) -> mx.array:
        """Rows [B, H, L, R] whose mean square is the first term of M over H.

        queries: of a prefill, [B, H, L, D], behind D dims their rotary part, if any. covariance: C [R, R].
        """
        nothing = mx.zeros((1, 1, 1, self.rank))
        dims = self.module.embed_q(nothing, transpose=False).shape[-1]
        absorbed = self.module.embed_q(queries[..., :dims]).astype(mx.float32)
        if self._spread is None:
            made = self._made()
            moved = np.einsum("hrv,rs,hsv->h", made, covariance, made, optimize=True)
            self._spread = mx.array(np.sqrt(np.maximum(moved, 0)).astype(np.float32))
        return absorbed * (scale * self._spread)[None, :, None, None]

    def whole(self, mean: np.ndarray) -> np.ndarray:
        """M [1, R, R] of the mean square [1, R, R] of `rows`."""
        made = self._made()
        return len(made) * mean + np.einsum("hrv,hsv->rs", made, made, optimize=True)[None]

    def _made(self) -> np.ndarray:
        """W^T of each head, [H, R, Dv] float64. The map is called, not read: its weights may be quantised."""
        eye = mx.eye(self.rank)[None, None]
        return np.array(self.module.unembed_out(eye)[0].astype(mx.float32), np.float64)
