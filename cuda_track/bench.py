"""`python -m cuda_track.bench`: time decode attention and sealing by Triton on one GPU, beside torch's own.

Attention is first checked against plain ops, then timed in a CUDA graph of dependent calls, each output
the next query. Caches take turns and together exceed the L2 cache, so that every call reads memory. The
baseline is the fastest of torch's SDPA backends on 16-bit keys and values, in both forms of grouped
queries, timed alike. Sealing is compared with a plain copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain, product
from statistics import median

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from cuda_track import cli
from cuda_track.cache.attention import attend
from cuda_track.cache.stores import Paged
from cuda_track.cache.view import CodePages, View
from cuda_track.codec.codec import Codec
from cuda_track.kernels import launch as kernels
from cuda_track.kernels import layout
from cuda_track.kernels.launch import Launch
from cuda_track.kernels.pool import PoolPages
from mlxkv.errors import UserError
from mlxkv.formats.config import Affine, CacheConfig, Side

COLD = 4  # times the L2 cache that rotating buffers fill at least
CALLS = 16  # of a graph
ROUNDS = 15  # replays, of which the median counts
CHECKED = 4096  # tokens
# rms against plain ops. Attention over random codes is even, so that outputs nearly cancel, and the bits that
# matrix units cut off at 1024 + code weigh more than in a model.
BOUND = 8e-3


def _both(bits: int, group: int) -> CacheConfig:
    side = Side(Affine(bits, group), "srft")
    return CacheConfig(side, side)


def _channels(bits: int, page: int) -> CacheConfig:
    """Keys with a scale per channel of a page."""
    keys = Side(Affine(bits, 0, axis="channel"), "srft")
    return CacheConfig(keys, Side(Affine(bits, page), "srft"), page=page)


FORMATS = {
    "int8": _both(8, 64),
    "int4": _both(4, 64),
    "int4-g32": _both(4, 32),
    "int4-channels": _channels(4, 64),
    "int3": _both(3, 128),
    "int2": _both(2, 128),
    "int2-g64": _both(2, 64),
    "int2-channels": _channels(2, 128),  # the preset int2, but for its transforms
}
# B, H, G, D, tokens; the ratios that int4 and int2 should reach
CASES = {
    "b1 128k": ((1, 32, 8, 128, 131072), {"int4": 2.4, "int2": 3.0}),
    "b8 32k": ((8, 32, 8, 128, 32768), {"int4": 2.7, "int2": 3.6}),
    "b16 128k": ((16, 32, 8, 128, 131072), {"int4": 2.8, "int2": 4.2}),
    "d256 32k": ((1, 4, 1, 256, 32768), {"int4": 1.0, "int2": 1.0}),
    "d256 128k": ((1, 4, 1, 256, 131072), {"int4": 1.0, "int2": 1.0}),
    "d64 32k": ((1, 32, 8, 64, 32768), {"int4": 1.0, "int2": 1.0}),
    "d64 128k": ((1, 32, 8, 64, 131072), {"int4": 1.0, "int2": 1.0}),
    "b1 4k": ((1, 32, 8, 128, 4096), {}),
}


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    kv_heads: int
    dims: int
    tokens: int


@dataclass(frozen=True)
class Row:
    """A line of the table. microseconds: median of a call. ratio: baseline over this (attention), share of the
    bandwidth of a copy (seal). wanted: the ratio to reach, 0 for none."""

    what: str
    case: str
    kind: str
    microseconds: float
    ratio: float
    wanted: float = 0.0
    gigabytes_per_second: float = 0.0
    launch: str = ""
    rms: float = 0.0


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


def baseline(shape: Shape, dtype: torch.dtype) -> tuple[float, str]:
    """Time torch's backends on plain caches. Returns (microseconds, name) of the fastest."""
    b, h, g, d, t = asdict(shape).values()
    count = buffers(2 * b * g * t * d * 2)
    caches = [[_normal(b, g, t, d, dtype) for _ in "kv"] for _ in range(count)]
    q, times = _normal(b, h, 1, d, dtype), []
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
            cli.note(f"{backend.name} {name}: {str(error).splitlines()[0]}")
            torch.cuda.synchronize()
    if not times:
        raise UserError("[bench] no backend of torch took this shape; choose another case")
    return min(times)


def _normal(b: int, g: int, t: int, d: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(b, g, t, d, dtype=dtype)


def pages_of(config: CacheConfig, shape: Shape, tokens: int) -> PoolPages:
    """Pages of random codes at shuffled places of a pool."""
    count, device = tokens // config.page, torch.get_default_device()
    codecs = codecs_of(config, shape, device)
    layouts = tuple(
        layout.SideLayout(c.spec, c.dims, config.page, keys)
        for c, keys in zip(codecs, (True, False), strict=True)
    )
    total, sides = shape.batch * count, []
    for at in layouts:
        side = {}
        for name, (size, dtype) in at.shapes(shape.kv_heads).items():
            if dtype == torch.float16:
                side[name] = torch.full((total, *size), 0.25, dtype=dtype, device=device)
            elif name == "numbers":  # scale .25, bias so that codes have mean 0
                bias = torch.tensor(-0.25 * (2**at.spec.bits - 1) / 2).half().view(torch.int16)
                pair = (bias.item() << 16) | torch.tensor(0.25).half().view(torch.int16).item()
                side[name] = torch.full((total, *size), pair, dtype=dtype, device=device)
            else:
                lowest, highest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
                x = torch.randint(
                    lowest, highest + 1, (total, *size), device=device, dtype=torch.int64
                )
                side[name] = x.to(dtype)
        sides.append(side)
    table = torch.randperm(total, device=device).int().view(shape.batch, count)
    counts = torch.full((shape.batch,), count, dtype=torch.int32, device=device)
    return PoolPages(codecs, layouts, tuple(sides), table, counts, tokens)


def codecs_of(config: CacheConfig, shape: Shape, device: torch.device) -> tuple[Codec, Codec]:
    """Return the codecs of keys and of values."""
    return tuple(Codec(side, shape.dims, config.page, None, device) for side in _sides(config))


def _sides(config: CacheConfig) -> tuple[Side, Side]:
    return config.keys, config.values


def windows(config: CacheConfig, shape: Shape, dtype: torch.dtype):
    """(sink, live) of a cache whose live window is half full."""
    tokens = config.sink, config.recent + config.page // 2
    b, g, d = shape.batch, shape.kv_heads, shape.dims
    return tuple(tuple(_normal(b, g, n, d, dtype) for _ in "kv") for n in tokens)


def checked(config: CacheConfig, shape: Shape, dtype: torch.dtype, launch: Launch) -> float:
    """rms of the kernel against plain ops on a short context that one program of a head reads, so that sums
    are as long as the timed ones."""
    launch = replace(launch, programs=0)
    pages = pages_of(config, shape, min(shape.tokens, CHECKED))
    sink, live = windows(config, shape, dtype)
    q = _normal(shape.batch, shape.heads, 1, shape.dims, dtype)
    scale = shape.dims**-0.5
    out = kernels.attend(q, pages, sink, live, scale, how=launch).float()
    plain = CodePages(pages.codecs, pages.stored, pages.tokens)
    floats = (tuple(x.float() for x in pair) for pair in (live, sink))
    right = attend(q.float(), View(*floats, plain), scale)
    return float((out - right).square().mean().sqrt() / right.square().mean().sqrt())


def attention(shape: Shape, name: str, dtype: torch.dtype, launch: Launch) -> tuple[float, int]:
    """Time decode attention. Returns (microseconds, bytes of codes)."""
    config = FORMATS[name]
    first = pages_of(config, shape, shape.tokens)
    size = sum(x.numel() * x.element_size() for side in first.sides for x in side.values())
    copies = [first] + [pages_of(config, shape, shape.tokens) for _ in range(buffers(size) - 1)]
    sink, live = windows(config, shape, dtype)
    scale = shape.dims**-0.5
    calls = [lambda x, p=p: kernels.attend(x, p, sink, live, scale, how=launch) for p in copies]
    return timed(calls, _normal(shape.batch, shape.heads, 1, shape.dims, dtype)), size


def attention_rows(cases: list[str], formats: list[str], dtype) -> Iterator[Row]:
    for case in cases:
        shape, ratios = Shape(*CASES[case][0]), CASES[case][1]
        base, backend = baseline(shape, dtype)
        yield Row("attention", case, f"torch {backend}", base, 1.0)
        for name in formats:
            config = FORMATS[name]
            launch = kernels.launch(shape.dims, config.values.quantizer.bits)
            error = checked(config, replace(shape, batch=1), dtype, launch)
            if error > BOUND:
                raise UserError(f"[bench] {name} is wrong by {error:.2g} with {launch}")
            micros, size = attention(shape, name, dtype, launch)
            yield Row(
                what="attention",
                case=case,
                kind=name,
                microseconds=micros,
                ratio=base / micros,
                wanted=ratios.get(name, 0.0),
                gigabytes_per_second=size / micros / 1e3,
                launch=str(launch),
                rms=error,
            )
        torch.cuda.empty_cache()


def seal_rows(formats: list[str], dtype: torch.dtype) -> Iterator[Row]:
    """Time the sealing of a prefill of 32768 tokens and 8 kv heads, one side at a time."""
    shape, device = Shape(1, 32, 8, 128, 32768), torch.get_default_device()
    x = [_normal(1, shape.kv_heads, shape.tokens, shape.dims, dtype) for _ in range(8)]
    target = torch.empty_like(x[0])
    copy = timed([lambda _, y=y: target.copy_(y) for y in x], x[0])
    speed = 2 * target.numel() * target.element_size() / copy / 1e3
    yield Row("seal", "copy", str(dtype).removeprefix("torch."), copy, 1.0, 0, speed)
    for name, (keys, label) in product(formats, ((True, "keys"), (False, "values"))):
        config = FORMATS[name]
        codecs = codecs_of(config, shape, device)
        store, of = Paged(config, codecs), 0 if keys else 1
        code, at, count = codecs[of], store.layouts[of], shape.tokens // config.page
        shapes = tuple(at.shapes(shape.kv_heads) for at in store.layouts)
        places = torch.tensor(store.pool.reserve(count, shapes, device), device=device)
        side = store.pool.sides[of]
        arguments = (at, side, places)
        calls = [
            lambda _, y=y, c=code, arguments=arguments: kernels.seal(c, y, *arguments) for y in x
        ]
        micros = timed(calls, x[0])
        size = x[0].numel() * x[0].element_size()
        size += count * sum(t[0].numel() * t.element_size() for t in side.values())
        sealed_speed = size / micros / 1e3
        yield Row("seal", label, name, micros, sealed_speed / speed, 0.5, sealed_speed)


def table(rows: list[Row]) -> str:
    lines = [
        f"{'what':<10} {'case':<10} {'kind':<26} {'us':>9} {'ratio':>7} {'wanted':>7} {'GB/s':>7}"
    ]
    for r in rows:
        line = f"{r.what:<10} {r.case:<10} {r.kind:<26} {r.microseconds:9.1f} {r.ratio:7.2f}"
        line += f" {r.wanted or '':>7} {r.gigabytes_per_second or 0:7.0f}"
        lines.append(line + (f"  rms {r.rms:.1g}, {r.launch}" if r.launch else ""))
    return "\n".join(lines)


def chosen(text: str, among: dict, option: str) -> list[str]:
    """Names of a comma-separated list. Raises UserError for unknown ones."""
    names = list(among) if text == "all" else text.split(",")
    for name in names:
        if name not in among:
            raise UserError(f"[{option}] unknown; got {name!r}; choose from {', '.join(among)}")
    return names


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--cases", default="all", help=", ".join(CASES))
    parser.add_argument("--formats", default="int4,int2", help=", ".join(FORMATS))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--no-attention", action="store_true")
    parser.add_argument("--no-seal", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    cases = chosen(options.cases, CASES, "--cases")
    formats = chosen(options.formats, FORMATS, "--formats")
    if not torch.cuda.is_available():
        raise UserError("[bench] needs an NVIDIA GPU; got none; nothing to choose here")
    torch.set_default_device("cuda")
    dtype, rows = getattr(torch, options.dtype), []
    attention_times = () if options.no_attention else attention_rows(cases, formats, dtype)
    for row in chain(attention_times, () if options.no_seal else seal_rows(formats, dtype)):
        cli.note(table([row]).splitlines()[1])  # at once, in case a later row fails
        rows.append(row)
    if not options.json:
        return print(table(rows))
    versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    print(json.dumps({"versions": versions, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    cli.run(main)
