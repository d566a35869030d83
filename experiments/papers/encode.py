"""Time the encode of SRFT int4 (arXiv 2605.05699): with lambda and without, and its CPU pathway (section 6).

    python -m experiments.papers.encode --out runs/papers/encode.json

`mlx cpu`: MLX's ops on its CPU stream, float32. On a Mac that stream multiplies by Accelerate, which runs on AMX; here
by the BLAS that MLX was built with. So a time measured here says nothing of a Mac's; what carries over is how the time
is made up:

    product   the transform as a product with [D, D], 2 D^2 operations a vector (the paper's way to AMX)
    fft       the same transform by MLX's FFT, without packing
    int4      abs-max codes a token, packed, without a transform
    srft      product and int4; srft+g32 a scale for 32 values; lambda+g32 with lambda in the matrix, where it is free
    lambda    a product with lambda a channel by itself, what a kernel that has butterflies pays

`triton`: the page kernel of cuda_track on a CUDA GPU, if there is one, beside a copy of the vectors; float16.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np

from experiments.options import Parser, at_least, check_out, made_on, words
from experiments.papers.ratios import markdown
from mlxkv import console
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.quantizers import Affine
from mlxkv.spec import affine as spec

PAGE, ROUNDS, LEAST = 64, 15, 2e-3  # tokens; timings; seconds that one of them takes at least
# Float32 operations a second of one core of an M1 Max (corsix/amx).
PEAKS = {"AMX": 1475e9, "NEON": 102e9}
Row = dict


def timed(call: Callable[[], object]) -> float:
    """Return the median seconds of a call that ends when its result is there."""
    call()
    start = time.perf_counter()
    call()
    count = max(1, round(LEAST / (time.perf_counter() - start)))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count)
    return median(times)


def scaled(dims: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (down, up) of SRFT behind some lambda [D], which is returned, too."""
    by = np.exp2(np.linspace(-4, 4, dims))
    return *spec.scaled(*spec.transform("srft", dims), by), by


def on_cpu(dims: int, vectors: int) -> Iterator[Row]:
    """Time MLX on its CPU stream."""
    import mlx.core as mx

    from mlxkv.codec.codec import Codec
    from mlxkv.codec.transform import Transform

    with mx.stream(mx.cpu):
        rows = np.random.default_rng(0).standard_normal((1, 1, vectors, dims))
        x = mx.array(rows.astype(np.float32))
        down, up, by = (mx.array(m.astype(np.float32)) for m in scaled(dims))
        signs = mx.array(spec.signs(dims, 0).astype(np.float32))
        token, grouped = (Side(Affine(4, group, True), "srft") for group in (0, 32))
        codecs = {
            "int4": Codec(Side(token.quantizer), dims, vectors),
            "srft": Codec(token, dims, vectors),
            "srft+g32": Codec(grouped, dims, vectors),
            "lambda+g32": Codec(grouped, dims, vectors, Transform(down, up)),
        }
        calls: dict[str, Callable[[], object]] = {
            "copy": lambda: mx.eval(x.astype(mx.float16)),
            "product": lambda: mx.eval(x @ down),
            "fft": lambda: mx.eval(mx.fft.rfft(x * signs)),
            "lambda": lambda: mx.eval(x * by),
        }
        for name, codec in codecs.items():
            calls[name] = lambda codec=codec: mx.eval(codec.encode(x))
        for name, call in calls.items():
            seconds = timed(call)
            row = {"track": "mlx cpu", "dims": dims, "vectors": vectors, "what": name}
            yield row | {"nanoseconds": seconds / vectors * 1e9}


def on_gpu(dims: int, vectors: int) -> Iterator[Row]:
    """Time cuda_track's kernel, as `cuda_track.bench` does."""
    import torch

    from cuda_track import bench
    from cuda_track.cache.stores import Paged, codecs_of
    from cuda_track.codec import transform
    from cuda_track.kernels import launch

    device, tokens = torch.device("cuda"), -(-vectors // PAGE) * PAGE
    x = torch.randn(1, 1, tokens, dims, device=device).half()
    target = torch.empty_like(x)

    def copy(q: torch.Tensor) -> torch.Tensor:
        target.copy_(x)
        return q

    calls = {"copy": copy}
    for name, group in (("int4", 0), ("srft", 0), ("srft+g32", 32), ("lambda+g32", 32)):
        side = Side(Affine(4, group, True), "none" if name == "int4" else "srft")
        store = Paged(
            CacheConfig(side, side), codecs_of(CacheConfig(side, side), (dims, dims), None, device)
        )
        if name.startswith("lambda"):
            store.codecs[0].transform = transform.of(*scaled(dims)[:2]).to(device)
        places = store.pool.reserve(tokens // PAGE, store.record, 1, device)
        to = store.layouts[0], store.pool.sides[0], torch.tensor(places, device=device)

        def encode(q: torch.Tensor, code=store.codecs[0], to=to) -> torch.Tensor:
            launch.quantize_pages(code, x, *to)
            return q

        calls[name] = encode
    for name, call in calls.items():
        seconds = bench.timed([call], x) * 1e-6
        row = {"track": "triton", "dims": dims, "vectors": tokens, "what": name}
        yield row | {"nanoseconds": seconds / tokens * 1e9}


def table(rows: list[Row]) -> str:
    """Return a table in Markdown: a line for each track, head dim and number of vectors, nanoseconds a vector."""
    whats = list(dict.fromkeys(row["what"] for row in rows))
    cells: dict[tuple, dict[str, float]] = {}
    for row in rows:
        own = cells.setdefault((row["track"], row["dims"], row["vectors"]), {})
        own[row["what"]] = row["nanoseconds"]
    lines = [["track", "D", "vectors", *whats, "GFLOPS of product"]]
    for (track, dims, vectors), found in cells.items():
        times = [f"{found[what]:.3g}" if what in found else "-" for what in whats]
        rate = f"{2 * dims**2 / found['product']:.3g}" if "product" in found else "-"
        lines.append([track, str(dims), str(vectors), *times, rate])
    return markdown(lines)


def prediction(dims: int) -> str:
    """Return what a core of a Mac could make of a product, in words."""
    least = " and ".join(
        f"{2 * dims**2 / rate * 1e9:.3g} ns by {name}" for name, rate in PEAKS.items()
    )
    return (
        f"prediction, not measured: a product of D {dims} takes a Mac's core at least {least} a vector; "
        "int4's part does not run on AMX and comes on top"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("papers.encode", __doc__)
    parser.add_argument("--dims", type=words, default=("64", "128", "256"), help="by commas")
    parser.add_argument("--vectors", type=words, default=("1", "64", "4096", "65536"))
    parser.add_argument("--out", type=Path, help="write the JSON document to this file")
    args = parser.parse_args(arguments)
    check_out(args.out)
    sizes = []
    for option in ("dims", "vectors"):
        given = getattr(args, option)
        if not all(word.isdecimal() for word in given):
            raise UserError(
                f"[--{option}] not numbers; got {','.join(given)}; choose such as 64,128"
            )
        sizes.append([int(word) for word in given])
        at_least(f"--{option}", min(sizes[-1]), (32, 1)[option == "vectors"])
    import torch

    start, rows = time.perf_counter(), []
    for dims in sizes[0]:
        for vectors in sizes[1]:
            for track in (on_cpu, *[on_gpu] * torch.cuda.is_available()):
                rows += track(dims, vectors)
    if args.out is not None:
        args.out.write_text(json.dumps(made_on(start) | {"rows": rows}, indent=1) + "\n")
    print(table(rows))
    for dims in sizes[0]:
        print(prediction(dims))


if __name__ == "__main__":
    console.run_tool(main)
