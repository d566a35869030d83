"""`mlxkv bench kernels`: decode attention, encode and unseal, alone. Right first, then timed."""

from __future__ import annotations

import mlx.core as mx
from rich.console import Console
from rich.progress import Progress

from mlxkv import console, doctor, encoding
from mlxkv.bench import attend, encode
from mlxkv.bench.case import Shape, parse_shape
from mlxkv.bench.timing import (
    chain,
    copy_bandwidth,
    default_dtype,
    middle,
    print_where,
    read_bandwidth,
    short,
    where,
)
from mlxkv.config import CacheConfig, parse_kv
from mlxkv.errors import UserError
from mlxkv.formats import Full
from mlxkv.metal.launch import backend

SHAPES = (Shape(1, 32, 8, 128), Shape(1, 4, 1, 256), Shape(1, 16, 8, 64))
BATCH_SHAPE, BATCH_CONTEXT = Shape(8, 32, 8, 128), 32768
CONTEXTS, CONTEXTS_CPU = "4k,32k,128k", "1k,4k"
ENCODE_SHAPE, ENCODE_TOKENS, ENCODE_TOKENS_CPU = Shape(1, 8, 8, 128), 32768, 1024
COLUMNS = (
    *("shape", "tokens", "preset", "by", "us", "SDPA us", "ratio", "mlx-lm us"),
    *("floor us", "of floor", "build us", "rms"),
)
ENCODE_COLUMNS = (
    *("shape", "tokens", "preset", "by", "encode", "ns/vector", "GB/s", "of copy", "GFLOP/s"),
    *("page us", "unseal GB/s", "of copy"),
)


def run(
    shapes: str | None = None,
    contexts: str | None = None,
    kv: str = "int4,int2",
    calls: int = 64,
    rounds: int = 3,
    encode_tokens: str | None = None,
    ways: str = encoding.KERNEL,
    mlx_lm: bool = True,
    as_json: bool = False,
) -> None:
    """The command. shapes, contexts, kv, ways: by commas. encode_tokens: of the encode batch. ways: of
    `mlxkv.encoding`, to be compared."""
    compared = [encoding.check(way.strip()) for way in ways.split(",")]
    presets = {name: _preset(name) for name in kv.split(",")}
    cases = _cases(shapes, contexts, presets)
    batch = _encode_tokens(encode_tokens, max(config.page for config in presets.values()))
    for name, number in (("--calls", calls), ("--rounds", rounds)):
        if number < 1:
            raise UserError(f"[{name}] must be at least 1; got {number}; choose a larger one")
    dtype, machine, versions = default_dtype(), where(), doctor.versions()
    print_where(machine, versions)
    rows, encodes = [], []
    with Progress(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("copy", total=len(cases) + len(presets) + 1)
        bandwidth = copy_bandwidth()
        reading = max(bandwidth, read_bandwidth())
        bars.advance(bar)
        for shape, tokens in cases:
            bars.update(bar, description=f"{shape} {tokens}")
            beside = mlx_lm and shape == cases[0][0]
            args = (presets, dtype, reading, calls, rounds, beside)
            rows += attend.rows(shape, tokens, *args)
            mx.clear_cache()
            bars.advance(bar)
        for name, config in presets.items():
            bars.update(bar, description=f"encode {name}")
            for way in compared:
                one = encode.row(name, config, ENCODE_SHAPE, batch, dtype, bandwidth, way)
                encodes.append(one)
            bars.advance(bar)
    link = _link(cases[0][0], dtype, calls)
    _show(rows, encodes, dtype, (bandwidth, reading), link, calls, rounds)
    if as_json:
        speeds = {"copy_gb_s": bandwidth / 1e9, "read_gb_s": reading / 1e9}
        measured = {**speeds, "link_us": link, "dtype": short(dtype)}
        data = {"machine": machine | measured, "versions": versions, "rows": rows + encodes}
        console.print_json(data)


def _preset(name: str) -> CacheConfig:
    config = parse_kv(name)
    if any(isinstance(side.quantizer, Full) for side in (config.keys, config.values)):
        raise UserError(
            f"[--kv] full precision is timed beside the others; got {name!r}; choose presets that "
            "compress keys and values, such as int4"
        )
    return config


def _cases(
    shapes: str | None, contexts: str | None, presets: dict[str, CacheConfig]
) -> list[tuple[Shape, int]]:
    names = (contexts or (CONTEXTS_CPU if backend() == "cpu" else CONTEXTS)).split(",")
    lengths = [console.parse_tokens(name, "--contexts") for name in names]
    least = max(config.window for config in presets.values()) + 1
    if min(lengths) < least:
        raise UserError(
            f"[--contexts] nothing is compressed in so few tokens; got {min(lengths)}; choose at "
            f"least {least}"
        )
    chosen = [parse_shape(name) for name in shapes.split(",")] if shapes else list(SHAPES)
    for shape in chosen:
        for name, config in presets.items():
            if reason := config.why_not(shape.dims, shape.dims):
                raise UserError(
                    f"[--shapes] {name} cannot store it: {reason}; got {shape}; choose another D"
                )
    cases = [(shape, length) for shape in chosen for length in lengths]
    if not shapes and BATCH_CONTEXT in lengths:
        cases.append((BATCH_SHAPE, BATCH_CONTEXT))
    return cases


def _encode_tokens(text: str | None, page: int) -> int:
    if text is None:
        return ENCODE_TOKENS_CPU if backend() == "cpu" else ENCODE_TOKENS
    tokens = console.parse_tokens(text, "--encode-tokens")
    if tokens % page:
        raise UserError(f"[--encode-tokens] got {text}; choose whole pages: a multiple of {page}")
    return tokens


def _link(shape: Shape, dtype: mx.Dtype, calls: int) -> float:
    """Microseconds of the addition that links the calls of a chain."""
    first, zeros = shape.queries(dtype), mx.zeros(shape.queries(dtype).shape, dtype)
    chains = [chain(lambda q, _: q, first * 1, [zeros], calls) for _ in range(6)]
    return 1e6 * middle(chains[1:]).run


def _show(rows, encodes, dtype, bandwidths, link, calls, rounds) -> None:
    table = []
    for r in rows:
        start = (r["shape"], r["tokens"], r["preset"], r["by"])
        if r["wrong"]:
            table.append((*start, "WRONG", *["-"] * 6, f"{r['rms']:.1e}"))
            continue
        theirs = "fails" if r["mlx_lm_reason"] else "-"
        if r["mlx_lm_us"]:
            theirs = f"{r['mlx_lm_us']:.1f}"
        numbers = (f"{r['us']:.1f}", f"{r['sdpa_us']:.1f}", f"{r['ratio']:.2f}", theirs)
        floor = (f"{r['floor_us']:.1f}", f"{r['of_floor']:.2f}")
        table.append((*start, *numbers, *floor, f"{r['build_us']:.1f}", f"{r['rms']:.1e}"))
    copying, reading = (f"{x / 1e9:.0f}" for x in bandwidths)
    title = f"one query token, {short(dtype)}; MLX copies {copying} GB/s, reads {reading} GB/s"
    console.print_table(COLUMNS, table, title)
    for reason in sorted({r["mlx_lm_reason"] for r in rows if r["mlx_lm_reason"]}):
        print(f"mlx-lm fails: {reason}")
    print(
        f"us: per call of `attend`, in chains of {calls} where each result feeds the next query, "
        f"median of {2 * rounds}; ratio: SDPA over ours, above 1 is faster\n"
        f"the addition that links the calls takes {link:.1f} us and is in every time; build: the "
        "host builds the graph, not in the others\n"
        "floor: stored bytes over the bandwidth of reading; "
        f"rms: against float32 attention over the decoded pages, WRONG above {_bound(rows)}"
    )
    table = [
        (
            *(r["shape"], r["tokens"], r["preset"], r["by"], r["encode"]),
            *(f"{r['encode_ns_per_vector']:.2f}", f"{r['encode_gb_s']:.1f}"),
            *(f"{r['encode_of_copy']:.2f}", f"{r['encode_gflop_s']:.1f}", f"{r['page_us']:.1f}"),
            *(f"{r['unseal_gb_s']:.1f}", f"{r['unseal_of_copy']:.2f}"),
        )
        for r in encodes
    ]
    console.print_table(ENCODE_COLUMNS, table)
    print(encode.FOOTNOTE)


def _bound(rows: list[dict]) -> str:
    return f"{rows[0]['bound']:g}"


if __name__ == "__main__":
    from mlxkv.bench.commands import main

    main("kernels")
