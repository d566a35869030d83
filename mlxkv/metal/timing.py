"""Time kernels by interleaved chains of dependent calls, and measure memory bandwidth for comparison."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx

from mlxkv.metal.launch import device_type

COPY_BYTES = 1 << 29  # size of the array copied to measure bandwidth, on a GPU
COPY_BYTES_CPU = 1 << 26
Result = TypeVar("Result")


class Chain(NamedTuple):
    """Seconds per call. build: building the graph in Python. run: `mx.eval` of it."""

    build: float
    run: float


def chain(
    call: Callable[[mx.array, Any], mx.array], first: mx.array, copies: Sequence, calls: int
) -> Chain:
    """Make `calls` calls in one eval, each on the result of the previous one.

    Independent calls would overlap on a GPU and flatter a kernel. The linking op is one addition, the same for every
    kernel compared; adding `first` keeps the queries from vanishing. Calls rotate through `copies`, so that no cache
    is in the L2.
    """
    q = first + mx.zeros_like(first)
    mx.eval(q)
    mx.synchronize()
    start = time.perf_counter()
    for i in range(calls):
        q = first + call(q, copies[i % len(copies)])
    build_end = time.perf_counter()
    mx.eval(q)
    done = time.perf_counter()
    return Chain((build_end - start) / calls, (done - build_end) / calls)


def middle(chains: Sequence[Chain]) -> Chain:
    return Chain(median(c.build for c in chains), median(c.run for c in chains))


def interleaved(
    tasks: dict[str, Callable[[], Result]], rounds: int, done: Callable[[], None] = lambda: None
) -> dict[str, list[Result]]:
    """Return the results of each task, run A B B A `rounds` times, so that drift affects all alike; the caller must
    warm them up."""
    results: dict[str, list[Result]] = {name: [] for name in tasks}
    for name in [*tasks, *reversed(tasks)] * rounds:
        results[name].append(tasks[name]())
        done()
    return results


def seconds_of(make: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds to build and compute the arrays of `make`, after a warm-up."""
    mx.eval(make())
    times = []
    for _ in range(repeats):
        mx.synchronize()
        start = time.perf_counter()
        mx.eval(make())
        times.append(time.perf_counter() - start)
    return median(times)


def copy_bandwidth() -> float:
    """Measure bytes per second, read plus written, of a large copy.

    The copy negates, since MLX elides plain copies; each result is kept, since MLX would reuse its memory.
    """
    size, steps = (COPY_BYTES_CPU, 2) if device_type() == "cpu" else (COPY_BYTES, 4)
    x = mx.random.normal((size // 4,))
    mx.eval(x)

    def copies() -> list[mx.array]:
        out = [x]
        for _ in range(steps):
            out.append(-out[-1])
        return out

    seconds = seconds_of(copies, 5)
    mx.clear_cache()
    return 2 * steps * size / seconds


def read_bandwidth() -> float:
    """Measure bytes per second of a max reduction over a large array."""
    size, steps = (COPY_BYTES_CPU, 1) if device_type() == "cpu" else (COPY_BYTES, 4)
    arrays = [mx.random.normal((size // 4,)) for _ in range(steps)]
    mx.eval(arrays)
    seconds = seconds_of(lambda: [mx.max(x) for x in arrays], 5)
    mx.clear_cache()
    return steps * size / seconds
