"""KVarN's balancing of tiles by a kernel. Plain-ops twin: `codec.dual_scale.balance`."""

from __future__ import annotations

from functools import cache, partial
from math import log

import mlx.core as mx

from mlxkv.codec import dual_scale
from mlxkv.metal.launch import Factory, launch

SIMDGROUPS = 8
MOST = 64  # values of a thread, which stay in its registers


def why_not(tokens: int, dims: int) -> str | None:
    """Why the kernel does not balance tiles of this size, or None."""
    if tokens % SIMDGROUPS or dims % 32:
        return (
            f"tiles of {tokens} tokens and {dims} dims are not shared evenly by {SIMDGROUPS} x 32"
        )
    if tokens * dims > 32 * SIMDGROUPS * MOST:
        return f"{tokens} tokens of {dims} dims do not fit in registers"
    return None


def helpers(make: Factory, tokens: int, dims: int) -> dict[str, dual_scale.Balance]:
    """Keyword arguments for `dual_scale.encode` so that the kernel balances; none where it cannot."""
    return {} if why_not(tokens, dims) else {"balance": partial(balance, make=make)}


@cache
def _numbers() -> mx.array:
    least, most = (x / log(2) for x in dual_scale.LOG_RANGE)
    kept = (*dual_scale.STD_RANGE, dual_scale.SMALLEST_STD, 1 - dual_scale.GAIN)
    return mx.array([least, most, *kept, 0.0, 0.0], mx.float32)


def balance(x: mx.array, axis: str, unit_std: bool, make: Factory) -> tuple[mx.array, mx.array]:
    """x: [..., T, R] float32 -> scales of tokens [..., T, 1] and of channels [..., 1, R]."""
    *lead, tokens, dims = x.shape
    count = x.size // (tokens * dims)
    of_tokens, of_channels = launch(
        "balance",
        [x, _numbers()],
        {
            **{"TOKENS": tokens, "DIMS": dims, "S": SIMDGROUPS, "CHANNEL": int(axis == "channel")},
            **{"UNIT": int(unit_std), "ROUNDS": dual_scale.ITERATIONS},
        },
        (32 * SIMDGROUPS * count, 1, 1),
        (32 * SIMDGROUPS, 1, 1),
        [((count, tokens), mx.float32), ((count, dims), mx.float32)],
        make,
        f"{32 * SIMDGROUPS}, 1",
    )
    return of_tokens.reshape(*lead, tokens, 1), of_channels.reshape(*lead, 1, dims)
