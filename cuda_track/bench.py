"""`python -m cuda_track.bench`: time decode attention and quantizing by Triton on one GPU, beside torch's own.

Attention is first checked against plain ops, then timed in a CUDA graph of dependent calls, each output
the next query. Caches take turns and together exceed the L2 cache, so that every call reads memory. The
baseline is the fastest of torch's SDPA backends on 16-bit keys and values, in both forms of grouped
queries, timed alike. Quantizing is compared with a plain copy.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, product
from math import tau
from statistics import median

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from cuda_track.cache.attention import attend
from cuda_track.cache.stores import Paged, codecs_of
from cuda_track.cache.view import CodePages, Pair, View
from cuda_track.codec.codec import both
from cuda_track.kernels import launch as kernels
from cuda_track.kernels import layout
from cuda_track.kernels.launch import Launch
from cuda_track.kernels.pool import PoolPages
from cuda_track.kernels.record import Record
from mlxkv import console
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.names import parse_kv
from mlxkv.formats.quantizers import Affine, MixedBits

DTYPE = torch.bfloat16
COLD = 4  # times the L2 cache that rotating buffers fill at least
CALLS = 16  # of a graph
ROUNDS = 15  # replays, of which the median counts
CHECKED = 4096  # tokens
# rms against plain ops. Attention over random codes is even, so that outputs nearly cancel, and the bits that
# matrix units cut off at 1024 + code weigh more than in a model.
BOUND = 8e-3


def _format(bits: int, group: int, channels: bool = False) -> CacheConfig:
    """Return a format without a calibration. channels: keys have a scale per channel of a page of `group` tokens."""
    values = Side(Affine(bits, group), "srft")
    if not channels:
        return CacheConfig(values, values)
    return CacheConfig(Side(Affine(bits, 0, axis="channel"), "srft"), values, page=group)


MIXED_DIMS = 128
# Such widths as a calibration gives 128 dims for 2.25 bits a value, here without its maps.
MIXED = Side(MixedBits(2.25, (4, 3, 2, 2, 2, 2, 1, 1)))
FORMATS = {
    "int8": _format(8, 64),
    "int4": _format(4, 64),
    "int4-channels": _format(4, 64, channels=True),
    "int3": _format(3, 128),
    "int2": _format(2, 128),
    "int2-channels": _format(2, 128, channels=True),  # the preset int2, but for its transforms
    **{
        name: parse_kv(name)
        for name in ("kivi-int2", "turbo-int4", "turbo-int3", "turbo-int2", "polar")
    },
    "fill": CacheConfig(MIXED, MIXED),
}


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    kv_heads: int
    dims: int
    tokens: int


CASES = {
    "b1 32k": Shape(1, 32, 8, 128, 32768),
    "b1 128k": Shape(1, 32, 8, 128, 131072),
    "b8 32k": Shape(8, 32, 8, 128, 32768),
    "b16 128k": Shape(16, 32, 8, 128, 131072),
    "d256 32k": Shape(1, 4, 1, 256, 32768),
    "d256 128k": Shape(1, 4, 1, 256, 131072),
    "d64 32k": Shape(1, 32, 8, 64, 32768),
    "d64 128k": Shape(1, 32, 8, 64, 131072),
    "b1 4k": Shape(1, 32, 8, 128, 4096),
}
QUANTIZED_SHAPE = Shape(1, 32, 8, 128, 32768)


@dataclass(frozen=True)
class Row:
    """A line of the table. microseconds: median of a call. ratio: baseline over this (attention), share of the
    bandwidth of a copy (quantize)."""

    case: str
    kind: str
    microseconds: float
    ratio: float = 1.0
    gigabytes_per_second: float = 0.0
    rms: float = 0.0

    def __str__(self) -> str:
        line = f"{self.case:<12} {self.kind:<26} {self.microseconds:9.1f} us {self.ratio:7.2f}"
        line += f" {self.gigabytes_per_second:7.0f} GB/s"
        return line + (f"  rms {self.rms:.1g}" if self.rms else "")


def timed(calls: list[Callable[[torch.Tensor], torch.Tensor]], q: torch.Tensor) -> float:
    """Time one call, in microseconds, by a graph of CALLS dependent ones that takes `calls` in turn."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compiles and warms up
        for call in calls:
            call(q)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = q
        for i in range(CALLS):
            x = calls[i % len(calls)](x)
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS)
    return median(times[2:])


def buffers(size: int) -> int:
    """Return how many caches of `size` bytes it takes so that none is in the L2 cache at its next turn."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, min(CALLS, -(-COLD * cache // size)))


def baseline(shape: Shape) -> tuple[float, str]:
    """Time torch's backends on plain caches. Returns (microseconds, name) of the fastest."""
    b, h, g, d, t = asdict(shape).values()
    caches = [_normal(b, g, t, d) for _ in range(buffers(2 * b * g * t * d * 2))]
    (q, _), times = _normal(b, h, 1, d), []
    forms = {
        "gqa": lambda x, k, v: sdpa(x, k, v, enable_gqa=True),
        "rows": lambda x, k, v: sdpa(x.reshape(b, g, h // g, d), k, v).reshape(b, h, 1, d),
    }
    for backend, name in product((SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION), forms):
        calls = [lambda x, k=k, v=v, f=forms[name]: f(x, k, v) for k, v in caches]
        try:
            with sdpa_kernel(backend):
                times.append((timed(calls, q), f"{backend.name.lower()} {name}"))
        except RuntimeError as error:  # a backend that does not take this shape
            console.note(f"{backend.name} {name}: {str(error).splitlines()[0]}")
            torch.cuda.synchronize()
    if not times:
        raise UserError("[bench] no backend of torch took this shape; choose another case")
    return min(times)


def _normal(*shape: int, dtype: torch.dtype = DTYPE) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a pair of random tensors."""
    return torch.randn(*shape, dtype=dtype), torch.randn(*shape, dtype=dtype)


def pages_of(config: CacheConfig, shape: Shape, tokens: int) -> PoolPages:
    """Return pages of random codes at shuffled places of a pool."""
    device, count = torch.get_default_device(), tokens // config.page
    codecs = codecs_of(config, (shape.dims, shape.dims), None, device)
    layouts, total = layout.layouts(codecs), shape.batch * count
    record = Record(layouts)
    sides = record.views(record.empty(total, shape.kv_heads, device))
    for at, side in zip(layouts, sides, strict=True):
        for name, x in side.items():
            if name == "numbers":
                for part, pair in zip(x.chunk(2, -1), _numbers(at), strict=True):
                    part[:] = torch.tensor(pair, dtype=torch.float16, device=device).view(
                        torch.int32
                    )
            else:
                limits = torch.iinfo(x.dtype)
                x[:] = torch.randint(limits.min, limits.max, x.shape, dtype=x.dtype)
    table = torch.randperm(total, device=device).int().view(shape.batch, count)
    counts = torch.full((shape.batch,), count, dtype=torch.int32, device=device)
    return PoolPages(codecs, layouts, sides, table, counts, tokens)


def _numbers(at: layout.Layout) -> tuple[tuple[float, float], ...]:
    """Return pairs of numbers for the halves of a page, so that what codes stand for has mean 0."""
    if isinstance(at, layout.BlockLayout):
        return ((0.25, 0.25),) * 2
    if at.kind == "polar":  # radii, and angles of a whole turn
        return (0.25, 0.0), (tau / 2**at.bits, 0.0)
    return ((0.25, -0.25 * (2**at.bits - 1) / 2 if at.kind == "affine" else 0.0),) * 2


def windows(config: CacheConfig, shape: Shape, dtype: torch.dtype = DTYPE) -> tuple[Pair, Pair]:
    """Return (sink, recent) of a cache whose recent window is half full, pairs of [B, G, T, D]."""
    tokens = config.sink, config.recent + config.page // 2
    return both(lambda n: _normal(shape.batch, shape.kv_heads, n, shape.dims, dtype=dtype), tokens)


def rms_of_kernel(config: CacheConfig, shape: Shape, dtype: torch.dtype, launch: Launch) -> float:
    """Return the rms of the kernel against plain ops, on a short context that one program of a head reads, so that
    sums are as long as the timed ones."""
    pages = pages_of(config, shape, min(shape.tokens, CHECKED))
    sink, recent = windows(config, shape, dtype)
    q, _ = _normal(shape.batch, shape.heads, 1, shape.dims, dtype=dtype)
    scale, launch = shape.dims**-0.5, replace(launch, programs=0)
    out = kernels.attend(q, pages, sink, recent, scale, tuned=launch).float()
    plain = CodePages(pages.codecs, pages.stored, pages.tokens)
    floats, floats_of_sink = (both(torch.Tensor.float, pair) for pair in (recent, sink))
    right = attend(q.float(), View(floats, floats_of_sink, plain), scale)
    return float((out - right).square().mean().sqrt() / right.square().mean().sqrt())


def attention(config: CacheConfig, shape: Shape) -> tuple[float, int]:
    """Time decode attention. Returns (microseconds, bytes of codes)."""
    copies = [pages_of(config, shape, shape.tokens)]
    size = sum(x.nbytes for side in copies[0].sides for x in side.values())
    copies += [pages_of(config, shape, shape.tokens) for _ in range(buffers(size) - 1)]
    (sink, recent), scale = windows(config, shape), shape.dims**-0.5
    calls = [lambda x, p=p: kernels.attend(x, p, sink, recent, scale) for p in copies]
    return timed(calls, _normal(shape.batch, shape.heads, 1, shape.dims)[0]), size


def attention_rows(cases: list[str], formats: list[str]) -> Iterator[Row]:
    for case in cases:
        shape = CASES[case]
        base, backend = baseline(shape)
        yield Row(case, f"torch {backend}", base)
        for name in formats:
            config = FORMATS[name]
            reason = kernels.why_not(config, (shape.dims, shape.dims))
            if name == "fill" and shape.dims != MIXED_DIMS:
                reason = f"its widths are those of {MIXED_DIMS} dims"
            if reason:
                console.note(f"{case} {name}: {reason}")
                continue
            rows = kernels.padded_rows(shape.heads // shape.kv_heads)
            device = torch.get_default_device()
            layouts = layout.layouts(codecs_of(config, (shape.dims, shape.dims), None, device))
            launch = kernels.launch_for(layouts, shape.dims, rows)
            error = rms_of_kernel(config, replace(shape, batch=1), DTYPE, launch)
            if error > BOUND:
                raise UserError(f"[bench] {name} is wrong by {error:.2g} with {launch}")
            micros, size = attention(config, shape)
            yield Row(case, name, micros, base / micros, size / micros / 1e3, error)
        torch.cuda.empty_cache()


def quantize_rows(formats: list[str]) -> Iterator[Row]:
    """Time the quantizing of a prefill, one side at a time."""
    shape, device = QUANTIZED_SHAPE, torch.get_default_device()
    x = [_normal(1, shape.kv_heads, shape.tokens, shape.dims)[0] for _ in range(8)]
    target = torch.empty_like(x[0])
    copy = timed([lambda _, y=y: target.copy_(y) for y in x], x[0])
    speed = 2 * target.nbytes / copy / 1e3
    yield Row("quantize", "copy", copy, gigabytes_per_second=speed)
    for name, (i, label) in product(formats, enumerate(("keys", "values"))):
        config = FORMATS[name]
        store = Paged(config, codecs_of(config, (shape.dims, shape.dims), None, device))
        count = shape.tokens // config.page
        reserved = store.pool.reserve(count, store.record, shape.kv_heads, device)
        places = torch.tensor(reserved, device=device)
        code, to = store.codecs[i], (store.layouts[i], store.pool.sides[i], places)

        def quantize(q: torch.Tensor, y: torch.Tensor, code=code, to=to) -> torch.Tensor:
            kernels.quantize_pages(code, y, *to)
            return q

        micros = timed([partial(quantize, y=y) for y in x], x[0])
        size = x[0].nbytes + count * sum(y[0].nbytes for y in store.pool.sides[i].values())
        quantized_speed = size / micros / 1e3
        yield Row(f"quantize {label}", name, micros, quantized_speed / speed, quantized_speed)


def parse_names(text: str, among: dict, option: str) -> list[str]:
    """Return the names in a comma-separated list. Raises UserError for unknown ones."""
    names = list(among) if text == "all" else text.split(",")
    for name in names:
        if name not in among:
            raise UserError(f"[{option}] unknown; got {name!r}; choose from {', '.join(among)}")
    return names


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="all", help=", ".join(CASES))
    parser.add_argument("--formats", default="int4,int2", help=", ".join(FORMATS))
    parser.add_argument("--no-quantize", "--no-seal", action="store_true", help="attention alone")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    cases = parse_names(options.cases, CASES, "--cases")
    formats = parse_names(options.formats, FORMATS, "--formats")
    if not torch.cuda.is_available():
        raise UserError("[bench] needs an NVIDIA GPU; got none; nothing to choose here")
    torch.set_default_device("cuda")
    rows = []
    for row in chain(
        attention_rows(cases, formats), () if options.no_quantize else quantize_rows(formats)
    ):
        console.note(str(row))  # at once, in case a later row fails
        rows.append(row)
    versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    document = {"versions": versions, "rows": [asdict(row) for row in rows]}
    print(json.dumps(document) if options.json else "\n".join(map(str, rows)))


if __name__ == "__main__":
    console.run_tool(main)
