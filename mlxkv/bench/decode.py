"""`mlxkv bench decode`: a whole model through mlx-lm's own loop, per preset and context."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import mlx.core as mx
from mlx_lm.generate import generate_step, wired_limit
from mlx_lm.models.cache import make_prompt_cache
from rich.console import Console
from rich.progress import Progress

from mlxkv import console, doctor, sealed
from mlxkv.bench.models import DTYPES, Subject, subject
from mlxkv.bench.plan import BASELINE, MLX_LM, MLX_LM_GROUP
from mlxkv.bench.reading import cache_bytes
from mlxkv.bench.timing import default_dtype, interleaved, print_where, short, where
from mlxkv.config import parse_kv
from mlxkv.errors import MachineError, UserError
from mlxkv.generate import PREFILL_STEP
from mlxkv.metal.launch import backend
from mlxkv.models import attach, detach
from mlxkv.shapes import layers_of, text_config

WARM = 4  # decoded before the clock starts
DIRECT_ABOVE, DIRECT_ABOVE_CPU = 32768, 1024  # a longer prefill takes long, and is not decoding
CONTEXTS, CONTEXTS_CPU = "4k,32k,128k", "1k,4k"
FILLS = ("auto", "prefill", "direct")
COLUMNS = (
    *("context", "preset", "by", "filled by", "first token s", "prefill tok/s", "decode tok/s"),
    *("of fp16", "spread", "token ms", "peak", "cache"),
)


def run(
    model: str = "tiny",
    contexts: str | None = None,
    kv: str = "fp16,int4",
    tokens: int = 64,
    rounds: int = 2,
    fill: str = "auto",
    dtype: str | None = None,
    bits: int | None = None,
    as_json: bool = False,
) -> None:
    """The command. contexts, kv: by commas; rounds: each runs every preset twice, A B B A."""
    presets = list(dict.fromkeys(name.strip() for name in kv.split(",")))
    for name in presets:
        parse_kv(name)
    names = (contexts or (CONTEXTS_CPU if backend() == "cpu" else CONTEXTS)).split(",")
    lengths = [console.parse_tokens(name, "--contexts") for name in names]
    _check(tokens, rounds, fill, dtype, bits, min(lengths))
    machine, versions = where(), doctor.versions()
    it = subject(model, DTYPES.get(dtype), default_dtype(), bits)
    print_where(machine, versions)
    rows = []
    with Progress(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("decode", total=len(lengths) * len(presets) * (2 * rounds + 1))
        for context in lengths:
            bars.update(bar, description=f"{model} {context}")
            rows += _rows(
                it,
                context,
                presets,
                _fill_of(fill, context),
                tokens,
                rounds,
                lambda: bars.advance(bar),
            )
    about = {"model": model, "weights": it.weights, "bits": bits, "dtype": short(it.dtype)}
    rows = [about | row for row in rows]
    _show(rows, tokens, rounds)
    if as_json:
        console.print_json({"machine": machine, "versions": versions, "rows": rows})


def _fill_of(fill: str, context: int) -> str:
    if fill != "auto":
        return fill
    limit = DIRECT_ABOVE_CPU if backend() == "cpu" else DIRECT_ABOVE
    return "direct" if context > limit else "prefill"


def _check(tokens, rounds, fill, dtype, bits, shortest) -> None:
    if shortest < 2:
        raise UserError(f"[--contexts] must be at least 2 tokens; got {shortest}; choose more")
    for name, number in (("--tokens", tokens), ("--rounds", rounds)):
        if number < 1:
            raise UserError(f"[{name}] must be at least 1; got {number}; choose a larger one")
    for name, value, choices in (
        ("--fill", fill, FILLS),
        ("--dtype", dtype, (None, *DTYPES)),
        ("--bits", bits, (None, 2, 3, 4, 6, 8)),
    ):
        if value not in choices:
            texts = ", ".join(str(choice) for choice in choices if choice)
            raise UserError(f"[{name}] unknown value; got {value}; choose from {texts}")


def _rows(
    it: Subject,
    context: int,
    presets: list[str],
    fill: str,
    tokens: int,
    rounds: int,
    done: Callable[[], None],
) -> list[dict]:
    """One row per preset: medians over interleaved runs, after one of each to warm up."""
    for name in presets:  # short, but where a basis that follows builds kernels on its way
        measure(it, name, context, fill, tokens if parse_kv(name).follows else 1)
        done()
    tasks = {name: lambda name=name: measure(it, name, context, fill, tokens) for name in presets}
    runs = interleaved(tasks, rounds, done)
    rows = []
    for name in presets:
        row = {"preset": name, "by": decoded_by(it, name), "context": context}
        row |= {"fill": fill, "runs": len(runs[name])}
        for key, first in runs[name][0].items():
            kind = type(first)  # bytes stay whole
            row[key] = first if first is None else kind(median(r[key] for r in runs[name]))
        speeds = [one["tokens_per_second"] for one in runs[name]]
        row["spread"] = (max(speeds) - min(speeds)) / row["tokens_per_second"]
        rows.append(row)
    plain = next((row["tokens_per_second"] for row in rows if row["preset"] == BASELINE), None)
    for row in rows:
        row["baseline_ratio"] = row["tokens_per_second"] / plain if plain else None
    return rows


def decoded_by(it: Subject, preset: str) -> str:
    """What computes the attention of the layers that grow."""
    if preset in MLX_LM:
        return "mlx-lm"
    config = parse_kv(preset)
    shape = next((s for s in layers_of(it.config) if s.kind == "full"), None)
    if not config.compresses or shape is None:
        return "MLX"
    return sealed.decoder(config, (shape.key_dim, shape.value_dim), it.dtype)


def measure(it: Subject, preset: str, context: int, fill: str, tokens: int) -> dict:
    """One run: fill a fresh cache with `context` tokens, then decode `tokens` after a few.

    preset: one of ours, or a name in MLX_LM: then mlx-lm quantises by its own path, from the first
    token on. prefill_seconds: all of the prompt but its last token; first_token_seconds: until the
    first token is there. Both are None where the cache was filled directly.
    """
    bits = MLX_LM.get(preset)
    used = BASELINE if bits else preset
    calibration = it.calibration if parse_kv(used).calibrated else None
    attach(it.model, used, calibration=calibration)
    try:
        cache = make_prompt_cache(it.model)
        mx.random.seed(0)
        mx.clear_cache()
        mx.reset_peak_memory()
        vocabulary = int(text_config(it.config)["vocab_size"])
        prompt = mx.random.randint(0, vocabulary, (1 if fill == "direct" else context,))
        mx.eval(prompt)
        if fill == "direct":
            fill_directly(cache, it, context - 1)
            mx.clear_cache()
            mx.reset_peak_memory()
        options = {"max_tokens": WARM + tokens, "prefill_step_size": PREFILL_STEP}
        if bits:
            options |= {"kv_bits": bits, "kv_group_size": MLX_LM_GROUP, "quantized_kv_start": 0}
        read = []

        def progress(done: int, total: int) -> None:
            if 0 < done < total:
                read[:] = [time.perf_counter()]

        options["prompt_progress_callback"] = progress
        with wired_limit(it.model):  # as mlx-lm generates
            times = [time.perf_counter()]
            for _, logprobs in generate_step(prompt, it.model, prompt_cache=cache, **options):
                times.append(time.perf_counter())
                last = logprobs
        if not mx.isfinite(last.max()).item():  # one NaN in the logits makes all of them NaN
            raise MachineError(f"[bench] NaN or infinity in the logits with {preset}; no times")
        prefill = read[0] - times[0] if fill == "prefill" else None
        timed = times[WARM:]
        gaps = [b - a for a, b in zip(timed, timed[1:], strict=False)]
        return {
            "prefill_seconds": prefill,
            "prefill_tokens_per_second": prefill and (context - 1) / prefill,
            "first_token_seconds": prefill and times[1] - times[0],
            "tokens_per_second": tokens / (timed[-1] - timed[0]),
            "token_ms": 1e3 * median(gaps),
            "peak_bytes": mx.get_peak_memory(),
            "kv_bytes": sum(layer.nbytes for layer in cache),
            "read_bytes": cache_bytes(cache),
        }
    finally:
        detach(it.model)


def fill_directly(cache: list, it: Subject, tokens: int) -> None:
    """Random keys and values for every layer, as many as a prefill would have left there."""
    shapes = layers_of(it.config)
    if len(shapes) != len(cache) or any(s.kind not in ("full", "sliding") for s in shapes):
        raise UserError(
            "[--fill] this model has caches of other kinds than keys and values; got direct; "
            "choose prefill"
        )
    for layer, shape in zip(cache, shapes, strict=True):
        for start in range(0, tokens, PREFILL_STEP):
            count = min(PREFILL_STEP, tokens - start)
            keys, values = (
                mx.random.normal((1, shape.kv_heads, count, dims), it.dtype)
                for dims in (shape.key_dim, shape.value_dim)
            )
            layer.update_and_fetch(keys, values)
            mx.eval(layer.state)


def _show(rows: list[dict], tokens: int, rounds: int) -> None:
    first = rows[0]
    weights = "random weights" if first["weights"] == "random" else "weights as stored"
    if first["bits"]:
        weights += f" in {first['bits']} bits"
    table = []
    for row in rows:
        prefill = ("-", "-")
        if row["prefill_seconds"]:
            seconds, speed = row["first_token_seconds"], row["prefill_tokens_per_second"]
            prefill = (f"{seconds:.3f}", f"{speed:.0f}")
        ratio = f"{row['baseline_ratio']:.2f}" if row["baseline_ratio"] else "-"
        table.append(
            (
                *(row["context"], row["preset"], row["by"], row["fill"], *prefill),
                *(f"{row['tokens_per_second']:.1f}", ratio, f"{100 * row['spread']:.0f} %"),
                f"{row['token_ms']:.2f}",
                console.human_bytes(row["peak_bytes"]),
                console.human_bytes(row["kv_bytes"]),
            )
        )
    title = f"{first['model']}, {weights}, {first['dtype']}"
    console.print_table(COLUMNS, table, title)
    print(
        f"decode: all of {tokens} tokens after {WARM}, sealed pages included; token ms: the median "
        f"one; both medians of {2 * rounds} interleaved runs; spread: between these\n"
        "first token: the prefill in chunks of "
        f"{PREFILL_STEP} and one token; direct: the cache was filled with random keys and values, "
        "no prefill was run, and the peak is that of decoding\n"
        "peak: weights included; cache: allocated, windows that rotate included"
    )


if __name__ == "__main__":
    from mlxkv.bench.commands import main

    main("decode")
