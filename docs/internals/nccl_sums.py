"""What sums over two GPUs cost inside a graph of MLX, without anything of mlxkv.

    mlx.launch -n 2 --backend nccl -- python docs/internals/nccl_sums.py
    mlx.launch -n 2 --backend nccl --env MLX_USE_CUDA_GRAPHS=0 -- python docs/internals/nccl_sums.py
    mlx.launch -n 2 --backend nccl --env NCCL_GRAPH_MIXING_SUPPORT=0 -- python docs/internals/nccl_sums.py

One graph has 64 products [1, 4096] @ [4096, 4096], as many as a decode step of 32 layers has sums, with and
without an all_sum behind each. MLX captures each all_sum in a CUDA graph of its own, which becomes a child of
the graph of the products (`CommandEncoder::CaptureContext`), anew in each evaluation.
"""

import statistics
import time

import mlx.core as mx

WIDTH, COUNT, STEPS = 4096, 64, 30

group = mx.distributed.init()
weight = (mx.random.normal((WIDTH, WIDTH)) * WIDTH**-0.5).astype(mx.bfloat16)
start = mx.ones((1, WIDTH), mx.bfloat16)
mx.eval(weight, start)


def chain(product, total):
    def step(x):
        for _ in range(COUNT):
            x = x @ weight if product else x
            x = mx.distributed.all_sum(x, group=group) * 0.5 if total else x * 0.5
        return x

    return step


def timed(name, step):
    x, handed, done = start, [], []
    for _ in range(STEPS):
        begin = time.perf_counter()
        x = step(x)
        mx.async_eval(x)
        handed.append(time.perf_counter() - begin)
        mx.eval(x)
        done.append(time.perf_counter() - begin)
    if group.rank() == 0:
        host, whole = (1e3 * statistics.median(times[5:]) for times in (handed, done))
        print(f"{name:32} handed over {host:8.3f} ms   done {whole:8.3f} ms", flush=True)


timed("64 products", chain(True, False))
timed("64 sums", chain(False, True))
timed("64 products and sums", chain(True, True))
timed("64 products and sums, compiled", mx.compile(chain(True, True)))
