"""`mlxkv bench kernels`: decode attention, encode and dequantize alone. Each is checked, then timed."""

from __future__ import annotations

import mlx.core as mx

from mlxkv import console
from mlxkv.bench.kernels import attend, encode
from mlxkv.bench.kernels.case import KernelShape
from mlxkv.bench.options import parse_contexts, print_machine, print_rows
from mlxkv.bench.subject import default_dtype, short
from mlxkv.cache.backends import PortableBackend, RowsBackend, TileBackend
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import parse_kv
from mlxkv.machine import machine, versions
from mlxkv.metal import gpu, predict
from mlxkv.metal.attend import MOST_ROWS
from mlxkv.metal.launch import device_type
from mlxkv.metal.timing import chain, copy_bandwidth, middle, read_bandwidth

# The first is that of Qwen3.5 to 3.8; Gemma 4's windows also have heads of 256 dims.
SHAPES = (KernelShape(1, 16, 4, 256), KernelShape(1, 32, 8, 128), KernelShape(1, 16, 8, 64))
BATCH_SHAPE, BATCH_CONTEXT = KernelShape(8, 32, 8, 128), 32768
CALLS, ROUNDS = 64, 3  # calls in a timed chain; each round runs all presets twice
CONTEXTS, CONTEXTS_CPU = "4k,32k,128k", "1k,4k"
ENCODE_SHAPE, ENCODE_TOKENS, ENCODE_TOKENS_CPU = KernelShape(1, 8, 8, 128), 32768, 1024
ABOUT = tuple((name, name, "") for name in ("shape", "tokens", "preset", "by"))
RMS = ("rms", "rms", ".1e")
PREDICTED = ("predicted us", "predicted_us", ".1f")  # on a known Apple GPU
COLUMNS = (
    *ABOUT,
    ("us", "us", ".1f"),
    ("SDPA us", "sdpa_us", ".1f"),
    ("ratio", "ratio", ".2f"),
    ("mlx-lm us", "mlx_lm_us", ".1f"),
    ("floor us", "floor_us", ".1f"),
    ("of floor", "of_floor", ".2f"),
    ("build us", "build_us", ".1f"),
    RMS,
)
ENCODE_COLUMNS = (
    *ABOUT,
    ("ns/vector", "encode_ns_per_vector", ".2f"),
    ("GB/s", "encode_gb_s", ".1f"),
    ("of copy", "encode_of_copy", ".2f"),
    ("GFLOP/s", "encode_gflop_s", ".1f"),
    ("page us", "page_us", ".1f"),
    ("dequantize GB/s", "unseal_gb_s", ".1f"),
    ("of copy", "unseal_of_copy", ".2f"),
)


def run_kernels(contexts: str | None, kv: str, as_json: bool) -> None:
    """Measure and print. contexts, kv: by commas."""
    presets = {name: _preset(name) for name in kv.split(",")}
    cases = _cases(contexts, presets)
    batch = ENCODE_TOKENS_CPU if device_type() == "cpu" else ENCODE_TOKENS
    dtype, computer, installed = default_dtype(), machine() | gpu.device(), versions()
    print_machine(computer, installed)
    rows, encodes = [], []
    steps = len(cases) + len(presets) + 1
    with console.progress("bench of kernels", steps, f"{steps} measurements") as count:
        bandwidth = copy_bandwidth()
        reading = max(bandwidth, read_bandwidth())
        count()
        for shape, tokens in cases:
            rows += attend.rows(
                shape,
                tokens,
                presets=presets,
                dtype=dtype,
                bandwidth=reading,
                calls=CALLS,
                rounds=ROUNDS,
                with_mlx_lm=shape in SHAPES[:2],
            )
            kv_heads, rows_of_head = shape.batch * shape.kv_heads, shape.heads // shape.kv_heads
            for row in rows[-len(presets) :]:
                place = row["preset"], shape.dims, kv_heads, rows_of_head, tokens
                by_tiles = rows_of_head > MOST_ROWS
                names = PortableBackend.name, TileBackend.name, RowsBackend.name
                by = dict(zip(names, (False, True, by_tiles), strict=True)).get(row["by"])
                row["predicted_us"] = None if by is None else predict.attend_us(*place, by)
            mx.clear_cache()
            count()
        for name, config in presets.items():
            encodes.append(
                encode.row(
                    name, config, ENCODE_SHAPE, batch - batch % config.page, dtype, bandwidth
                )
            )
            count()
    link = _link(cases[0][0], dtype)
    speeds = {"copy_gb_s": bandwidth / 1e9, "read_gb_s": reading / 1e9}
    measured = {**speeds, "link_us": link, "dtype": short(dtype)}
    _show(rows, measured)
    print_rows(ENCODE_COLUMNS, encodes, "")
    console.say(encode.FOOTNOTE)
    if as_json:
        data = {"machine": computer | measured, "versions": installed, "rows": rows + encodes}
        console.print_json(data)


def _preset(name: str) -> CacheConfig:
    config = parse_kv(name)
    if config.keys.quantizer.exact or config.values.quantizer.exact:
        raise UserError(
            f"[--kv] full precision is timed beside the others; got {name!r}; choose presets that "
            "compress keys and values, such as int4"
        )
    return config


def _cases(contexts: str | None, presets: dict[str, CacheConfig]) -> list[tuple[KernelShape, int]]:
    text = contexts or (CONTEXTS_CPU if device_type() == "cpu" else CONTEXTS)
    shortest = max(config.window for config in presets.values()) + 1
    lengths = parse_contexts(text, shortest, why="nothing is compressed in so few tokens")
    for shape in SHAPES:
        for name, config in presets.items():
            if reason := config.why_not(shape.dims, shape.dims):
                raise UserError(f"[--kv] cannot store {shape}: {reason}; got {name}")
    cases = [(shape, length) for shape in SHAPES for length in lengths]
    if BATCH_CONTEXT in lengths:
        cases.append((BATCH_SHAPE, BATCH_CONTEXT))
    return cases


def _link(shape: KernelShape, dtype: mx.Dtype) -> float:
    """Return the microseconds of the addition that links the calls in a chain."""
    first, zeros = shape.queries(dtype), mx.zeros(shape.queries(dtype).shape, dtype)
    chains = [chain(lambda q, _: q, first * 1, [zeros], CALLS) for _ in range(6)]
    return 1e6 * middle(chains[1:]).run


def _show(rows: list[dict], measured: dict) -> None:
    written = []
    for row in rows:
        if row["wrong"]:
            row = {key: row[key] for _, key, _ in (*ABOUT, RMS)} | {"us": "WRONG"}
        elif row["mlx_lm_reason"]:
            row = row | {"mlx_lm_us": "fails"}
        written.append(row)
    copying, reading = (f"{measured[name]:.0f}" for name in ("copy_gb_s", "read_gb_s"))
    title = f"one query token, {measured['dtype']}; MLX copies {copying} GB/s, reads {reading} GB/s"
    predicted = [PREDICTED] if any(row["predicted_us"] for row in rows) else []
    print_rows([*COLUMNS, *predicted], written, title)
    for reason in sorted({r["mlx_lm_reason"] for r in rows if r["mlx_lm_reason"]}):
        console.say(f"mlx-lm fails: {reason}")
    console.say(
        f"us: per call of `attend`, in chains of {CALLS} where each result feeds the next query, "
        f"median of {2 * ROUNDS}; ratio: SDPA's time over ours, above 1 is faster\n"
        f"every time includes {measured['link_us']:.1f} us for the addition that links the calls; "
        "build: Python builds the graph, not included in the other times\n"
        "floor: stored bytes over the bandwidth of reading; rms: against float32 attention over the "
        f"decoded pages, WRONG above {rows[0]['bound']:g}"
    )
