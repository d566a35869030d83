"""Calibration: one pass over some text gives every kv head its rotations and balanced transforms."""

from __future__ import annotations

import torch


def second_moment(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """x^T x over the rows of each kv head's group: [B, H, L, D] -> [G, D, D] float32."""
    rows = x.float().reshape(x.shape[0], kv_heads, -1, x.shape[3])
    rows = rows.swapaxes(0, 1).reshape(kv_heads, -1, x.shape[3])
    return rows.mT @ rows
