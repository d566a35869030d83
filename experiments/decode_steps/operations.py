"""What single operations of a step cost MLX's host."""

from __future__ import annotations

import time
from statistics import median

import mlx.core as mx

from mlxkv import console
from mlxkv.cache.attention import attend
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.formats.names import parse_kv

CHAIN = 200  # operations


def operations() -> None:
    """Print, for operations of a step of one token, what Python takes to build one, MLX to hand it over,
    and how long until it is done: of chains of CHAIN, in microseconds."""
    half = mx.bfloat16
    x, gate = (mx.random.normal((1, 1, 1536)).astype(half) for _ in range(2))
    head = mx.random.normal((1, 12, 1, 128)).astype(half)
    new = mx.random.normal((1, 2, 1, 128)).astype(half)
    keys, values = (mx.random.normal((1, 2, 4096, 128)).astype(half) for _ in range(2))
    matrix, norm, live = gate.reshape(-1, 1) @ gate[0], gate[0, 0], mx.zeros((1, 2, 136, 128), half)
    packed = mx.quantize(matrix, group_size=64, bits=4)
    number = mx.array([5], mx.int32)
    places = mx.broadcast_to(number[None, None, :, None], new.shape)
    cache = CompressedKVCache(parse_kv("int4"))
    cache.update_and_fetch(keys, values)
    view = cache.update_and_fetch(new, new)[0]
    mx.eval(x, gate, head, new, keys, values, packed, live, places, cache.state)
    tasks = {
        "quantized product": (lambda y: mx.quantized_matmul(y, *packed, group_size=64, bits=4), x),
        "product": (lambda y: y @ matrix, x),
        "norm": (lambda y: mx.fast.rms_norm(y, norm, 1e-6), x),
        "sum": (lambda y: y + gate, x),
        "rotation": (
            lambda y: mx.fast.rope(
                y, 128, traditional=False, base=1e6, scale=1.0, offset=number[0]
            ),
            head,
        ),
        "scatter": (lambda y: mx.put_along_axis(y, places, new, axis=2), live),
        "slice at a dynamic place": (lambda y: mx.slice_update(y, new, number, axes=(2,)), live),
        "SDPA over 4096": (
            lambda y: mx.fast.scaled_dot_product_attention(y, keys, values, scale=0.1),
            head,
        ),
        "int4 over 4096": (lambda y: attend(y, view, 0.1), head),
    }
    table = []
    for name, (task, start) in tasks.items():
        times = [_chain(task, start) for _ in range(12)][2:]
        table.append(
            [name, *(f"{1e6 * median(each) / CHAIN:.2f}" for each in zip(*times, strict=True))]
        )
    console.print_table(("operation", "build us", "hand over us", "done us"), table, "")


def _chain(task, x: mx.array) -> tuple[float, float, float]:
    """Seconds to build a chain, to hand it over, and until it is done from there."""
    mx.synchronize()
    start = time.perf_counter()
    for _ in range(CHAIN):
        x = task(x)
    built = time.perf_counter()
    mx.async_eval(x)
    handed = time.perf_counter()
    mx.eval(x)
    return built - start, handed - built, time.perf_counter() - built
