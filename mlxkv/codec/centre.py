"""The calibrated mean of a layer's keys, which is taken from every key as it arrives. Spec: `mlxkv.spec.balanced`.

Attention needs nothing back: q . (k - mean) is q . k less one number for all keys of a query, which softmax does not
see. That holds because every key of the layer is without it, those of the exact windows, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, eq=False)
class Centre:
    """mean: [G, 1, D] float32."""

    mean: mx.array

    def left(self, keys: mx.array) -> mx.array:
        """keys [B, G, L, D] without the mean, in their dtype."""
        return (keys.astype(mx.float32) - self.mean).astype(keys.dtype)


def left(centre: Centre | None, keys: mx.array) -> mx.array:
    """`Centre.left`; the keys themselves where there is no centre."""
    return keys if centre is None else centre.left(keys)
